"""What other tools wrote, turned into records.

A reader recognises a format by its head and yields neutral records (`records.evidence`): dumps, logs, stacks, tables,
traces, health checks, accounting of schedulers, topologies. Readers import `records` and `errors`, and they decide
nothing. Everything they read is bounded, and nothing of it is executed.
"""

__all__: list[str] = []
