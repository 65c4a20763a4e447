"""How people see a job and a fleet.

An empty room: pages that read records will live here. It can change nothing: it may import `records`, `store`,
`fleet`, `diagnosis` and `traffic`, never `control`, `service` or `training`.
"""

__all__: list[str] = []
