"""How much memory there is, by what the system and cgroups of both versions say, on made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.store.machine_memory import free_bytes, machine_bytes

NO_LIMIT = "9223372036854771712"  # as version 1 writes it


class Machine:
    """What a machine says of its memory, and of the cgroups that a process is in."""

    def __init__(self, directory: Path) -> None:
        self.meminfo, self.groups, self.membership = (directory / name for name in ("meminfo", "groups", "cgroup"))
        self.meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   90 kB\n")
        self.groups.mkdir()
        self.in_groups("0::/")

    def in_groups(self, *lines: str) -> None:
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **said: object) -> None:
        """Files of one group: its name has `_in_bytes` behind it in version 1."""
        place = self.groups / path
        place.mkdir(parents=True, exist_ok=True)
        for name, text in said.items():
            (place / f"memory.{name}").write_text(f"{text}\n")

    @property
    def free(self) -> int:
        return free_bytes(self.meminfo, self.groups, membership=self.membership)

    @property
    def whole(self) -> int:
        return machine_bytes(self.meminfo, self.groups, membership=self.membership)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_free_memory_is_the_least_of_what_system_and_cgroup_say(machine: Machine, tmp_path: Path) -> None:
    assert (machine.free, machine.whole) == (90 * 1024, 100 * 1024)
    machine.group(".", max="max")
    assert (machine.free, machine.whole) == (90 * 1024, 100 * 1024)
    machine.group(".", max=3000, current=1000)
    assert (machine.free, machine.whole) == (2000, 3000)
    machine.group(".", current=9000)
    assert machine.free == 0
    assert free_bytes(tmp_path / "none", tmp_path / "none", membership=tmp_path / "none") > 1 << 60


def test_a_limit_on_any_cgroup_above_the_own_one_counts(machine: Machine) -> None:
    """As Slurm sets it on a job, and not on the step that the process is in."""
    machine.in_groups("1:name=systemd:/elsewhere", "0::/slurm/job_1/step_0")
    for path, limit in (("slurm/job_1/step_0", "max"), ("slurm/job_1", "3000"), ("slurm", "9000")):
        machine.group(path, max=limit, current=1000)
    assert (machine.free, machine.whole) == (2000, 3000)
    machine.group("slurm/job_1", stat="anon 500\nactive_file 50\ninactive_file 450")
    assert machine.free == 2450
    machine.group("slurm/job_1/step_0", high=2500)
    assert machine.free == 1500
    machine.in_groups("0::/../slurm/job_1")
    assert machine.free == 90 * 1024


def test_version_1_counts_alike(machine: Machine) -> None:
    machine.in_groups("12:cpuset:/", "5:hugetlb,memory:/slurm/job_1/step_0", "1:name=systemd:/elsewhere")
    machine.group("memory", limit_in_bytes=NO_LIMIT, usage_in_bytes=50_000)
    machine.group("memory/slurm/job_1/step_0", limit_in_bytes=NO_LIMIT, usage_in_bytes=1000)
    assert (machine.free, machine.whole) == (90 * 1024, 100 * 1024)
    machine.group("memory/slurm/job_1", limit_in_bytes=3000, usage_in_bytes=1000)
    assert (machine.free, machine.whole) == (2000, 3000)
    machine.group("memory/slurm/job_1", stat="cache 900\ninactive_file 7\ntotal_inactive_file 450")
    assert machine.free == 2450


def test_a_container_finds_its_limit_where_its_group_is_mounted(machine: Machine) -> None:
    """With version 1 its path is that of the host, which it cannot see."""
    machine.in_groups("5:memory:/docker/abc", "0::/docker/abc")
    machine.group("memory", limit_in_bytes=5000, usage_in_bytes=1000)
    assert (machine.free, machine.whole) == (4000, 5000)


def test_a_machine_with_both_versions_is_bound_by_both(machine: Machine) -> None:
    machine.in_groups("5:memory:/job", "0::/job")
    machine.group("memory/job", limit_in_bytes=5000, usage_in_bytes=1000)
    machine.group("job", max=6000, current=5000)
    assert (machine.free, machine.whole) == (1000, 5000)
