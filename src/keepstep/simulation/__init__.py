"""What would happen: the control plane run against a seeded world.

An empty room: a simulator that drives `control` with a fake network, clock and processes will live here. It may
import the pure packages and the in-memory twins of `store`, never `service` or torch.
"""

__all__: list[str] = []
