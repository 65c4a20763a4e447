"""Why a job left its pattern: records in, findings out.

One function today, the onset of a loss; those that name a rank, a node or a path will live here too. Pure:
no clock, no input or output, no torch; they may import `records` and `errors`, never a sibling.
"""

__all__: list[str] = []
