"""Why a job left its pattern: records in, findings out.

Two ways in: what members of a running job summarise (live), and what other tools left behind (`dump_verdict` for dumps,
tables and traces). Both find the origin of a hang with the same graph (`waiting`, `wavefront`). Pure: no clock, no
input or output, no torch; they may import `records` and `errors`, never a sibling.
"""

__all__: list[str] = []
