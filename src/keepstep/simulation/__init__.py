"""What would happen: the control plane run against a seeded world of processes, networks and faults."""

__all__: list[str] = []
