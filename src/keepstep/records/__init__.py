"""What happened: frozen, versioned values, their encoding, and the layout of the recorder's ring. Pure."""

from __future__ import annotations

__all__: list[str] = []
