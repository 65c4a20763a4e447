"""Who and what a process group is: the questions that torch.distributed asks of one beside its collectives.

FSDP2, DTensor and distributed checkpoint ask most of these; the base class would need C++ backends to answer them.
"""

from __future__ import annotations

from datetime import timedelta

import torch

__all__ = ["GroupIdentity"]


class GroupIdentity:
    """The answers; a process group inherits them and sets the attributes named here."""

    # read by torch.distributed where it treats a group as a backend
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    _own: int
    _count: int
    _name: str
    _description: str
    _timeout_s: float
    _last: int
    _named: bool

    def size(self) -> int:
        """Members of the group."""
        return self._count

    def rank(self) -> int:
        """Own rank in the group."""
        return self._own

    getSize, getRank = size, rank

    def name(self) -> str:
        """ "keepstep"."""
        return "keepstep"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        """The name torch gave to the group, equal on all members."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for, in words."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def getGroupName(self) -> str:
        """As `group_name`."""
        return self._name

    def getGroupDesc(self) -> str:
        """As `group_desc`."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name if not self._named else self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def _get_backend(self, device: torch.device) -> GroupIdentity:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._last

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every member counts from one."""

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of later collectives without one of their own."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout
