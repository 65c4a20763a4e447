"""Why a job left its pattern: records in, findings out.

An empty room: the functions that name a rank, a node or a path from the timing of collectives will live here. Pure:
no clock, no input or output, no torch; they may import `records` and `errors`, never a sibling.
"""

__all__: list[str] = []
