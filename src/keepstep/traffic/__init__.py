"""Which way bytes go: topology and demand in, routes out.

An empty room: the planner that keeps large flows off shared links will live here. Pure, like `diagnosis`; `control`
may ask it.
"""

__all__: list[str] = []
