"""torchrun's variables: the full set for a rank, none of a rank's for a standby."""

from __future__ import annotations

import pytest

from keepstep.service.environment import training_environment

# PyTorch 2.13, torch/distributed/elastic/agent/server/local_elastic_agent.py, `worker_env`; the last two are optional.
TORCHRUN = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMP_NUM_THREADS",
]
SHARED = {
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}
RANKED = SHARED | {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def made(base: dict[str, str], ordered: dict[str, str], *, port: int | None = None) -> dict[str, str]:
    return training_environment(base, ordered, run_id="j", own={"KEEPSTEP_AGENT": "name"}, master_port=port)


def test_a_rank_has_the_full_set():
    found = made({"PATH": "/bin"}, RANKED)
    assert set(TORCHRUN) <= set(found)
    assert (found["ROLE_RANK"], found["ROLE_WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("3", "4", "1")
    assert (found["KEEPSTEP_AGENT"], found["TORCHELASTIC_RUN_ID"], found["PATH"]) == ("name", "j", "/bin")


def test_a_standby_has_no_rank_even_if_the_launcher_has():
    found = made({"RANK": "7", "LOCAL_RANK": "7", "GROUP_RANK": "7", "ROLE_RANK": "7"}, SHARED)
    assert not {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"} & set(found)
    assert found["WORLD_SIZE"] == "4"


@pytest.mark.parametrize(("port", "expected"), [(None, "1"), (4711, "4711")])
def test_the_agent_may_choose_the_port(port, expected):
    assert made({}, RANKED, port=port)["MASTER_PORT"] == expected


def test_what_a_person_set_is_kept():
    found = made({"OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": ""}, RANKED)
    assert (found["OMP_NUM_THREADS"], found["PYTHONUNBUFFERED"]) == ("8", "")
