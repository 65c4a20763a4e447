"""What to do: pure state machines of the job, its members and their changes; events in, orders and reasons out."""

__all__: list[str] = []
