"""A site's plan in its journal: what happened is what is in force after opening it again; refusals change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import KeepstepError, RecordError, StoreError, TrafficError, UsageError
from keepstep.records.demand import CollectiveUse, Demand, Seat
from keepstep.records.plan import Route, TrafficRoutes
from keepstep.records.topology import ClosShape
from keepstep.service.clock import SystemClock
from keepstep.service.traffic_site import TrafficSite, history
from keepstep.service.traffic_text import change_text
from keepstep.store.journal import Journal
from keepstep.traffic.clos import clos
from keepstep.traffic.stages import StagePolicy

ALL = StagePolicy("large_known", 0, 2)
TOPOLOGY = clos(ClosShape(hosts=16, hosts_per_leaf=4, spines=4, port_gbps=400.0))


def ring(job: str, hosts: tuple[int, ...], priority: int = 0) -> Demand:
    seats = tuple(Seat(rank, f"h{host}") for rank, host in enumerate(hosts))
    return Demand(job, seats, (CollectiveUse("dp", "all_reduce", tuple(range(len(hosts))), 1e9),), 0.1, priority)


def create(directory) -> TrafficSite:
    return TrafficSite.create(directory, TOPOLOGY, measure="flows", clock=SystemClock())


def reopened(site: TrafficSite, directory) -> TrafficSite:
    site.close()
    return TrafficSite.open(directory, SystemClock())


def test_jobs_links_and_departures_are_there_after_opening_again(tmp_path):
    site = create(tmp_path)
    for number in range(4):
        site.arrive(ring(f"j{number}", (number, 4 + number, 8 + number, 12 + number)), stage=ALL)
    site.set_links(down=["leaf0>spine1", "spine3"])
    site.leave("j1")
    site.set_links(up=["spine3"])
    before = site.planner.plan()
    site = reopened(site, tmp_path)
    after = site.planner.plan()
    site.close()
    assert {r.flow: r for r in after.routes} == {r.flow: r for r in before.routes}
    assert (after.version, after.max_load) == (before.version, before.max_load)
    assert site.planner.network.down == {"leaf0>spine1"}


def test_a_job_alone_is_planned_when_others_come(tmp_path):
    site = create(tmp_path)
    site.arrive(ring("alone", (0, 4)), stage=ALL)
    assert site.planner.routes() == ()
    site.arrive(ring("other", (1, 5)), stage=ALL)
    assert {route.flow.split(":")[0] for route in site.planner.routes()} == {"alone", "other"}
    site = reopened(site, tmp_path)
    assert len(site.planner.routes("alone")) == 2
    site.close()


def test_an_outcome_is_of_the_job_that_came_last_not_of_one_that_is_planned_because_of_it(tmp_path):
    site = create(tmp_path)
    site.arrive(ring("alone", (0, 4)), stage=ALL)
    came = site.arrive(ring("other", (1, 5)), stage=ALL)
    assert history(tmp_path).changes[-1].job == "alone"
    told = site.outcome(1.25)
    site.close()
    assert (told.job, told.stage, told.version, told.predicted) == ("other", came.stage, came.version, came.predicted)


def test_stages_say_what_would_be_done_and_what_came_of_it(tmp_path):
    site = create(tmp_path)
    busy = (0, 4, 1, 5, 2, 6)
    record = site.arrive(ring("j", busy, priority=5), stage=StagePolicy("advise"))
    assert (record.applied, record.added > 0, site.planner.jobs) == (False, True, ())
    record = site.arrive(ring("j", busy, priority=5), stage=StagePolicy("low_priority", 1))
    assert (record.applied, "above 1" in record.reason) == (False, True)
    record = site.arrive(ring("j", busy, priority=5), stage=ALL)
    assert record.applied and record.predicted >= 1.0
    site.outcome(1.25, "bench")
    site.close()
    told = history(tmp_path)
    assert [change.applied for change in told.changes if change.change == "arrive"] == [False, False, True]
    assert (told.outcomes[0].measured, told.outcomes[0].predicted) == (1.25, record.predicted)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda site: site.arrive(ring("a", (0, 4)), stage=ALL), "already"),
        (lambda site: site.arrive(ring("b", (0, 99)), stage=ALL), "not in the topology"),
        (lambda site: site.leave("nobody"), "not in the plan"),
        (lambda site: site.set_links(down=["leaf0>nowhere"]), "no link"),
        (lambda site: site.set_links(up=["nothing"]), "no switch"),
        (lambda site: site.set_links(down=["spine1"], up=["spine1"]), "down and up"),
    ],
)
def test_what_fails_is_written_down_and_the_plan_stays(tmp_path, work, words):
    site = create(tmp_path)
    site.arrive(ring("a", (0, 4, 1, 5)), stage=ALL)
    before = site.planner.plan()
    with pytest.raises(TrafficError, match=words):
        work(site)
    assert site.planner.plan() == before
    site = reopened(site, tmp_path)
    assert {r.flow: r for r in site.planner.plan().routes} == {r.flow: r for r in before.routes}
    site.close()
    assert history(tmp_path).changes[-1].change == "refused"


def test_routes_without_their_change_do_not_count(tmp_path):
    """A crash between the routes and the change that puts them in force."""
    site = create(tmp_path)
    site.arrive(ring("a", (0, 4, 1, 5)), stage=ALL)
    before = {route.flow: route for route in site.planner.routes()}
    site.close()
    journal = Journal.open(tmp_path)
    flow = next(iter(before))
    journal.append(TrafficRoutes(version=99, routes=(Route(flow, ("leaf0", "spine3", "leaf1")),)))
    journal.close()
    site = TrafficSite.open(tmp_path, SystemClock())
    assert {route.flow: route for route in site.planner.routes()} == before
    site.close()


def test_routes_without_their_change_do_not_count_with_the_next_change_either(tmp_path):
    """A crash before the first change after opening is in force; then another change comes."""
    site = create(tmp_path)
    site.arrive(ring("a", (0, 4, 1, 5)), stage=ALL)
    version, route = site.planner.version, site.planner.routes()[0]
    site.close()
    journal = Journal.open(tmp_path)
    elsewhere = next(f"spine{n}" for n in range(4) if f"spine{n}" != route.path[1])
    other = Route(route.flow, (route.path[0], elsewhere, route.path[2]))
    journal.append(TrafficRoutes(version=version + 1, routes=(other,)))
    journal.close()
    site = TrafficSite.open(tmp_path, SystemClock())
    site.arrive(ring("b", (8, 12, 9, 13)), stage=ALL)
    before = {route.flow: route for route in site.planner.routes()}
    site = reopened(site, tmp_path)
    assert {route.flow: route for route in site.planner.routes()} == before
    site.close()


@pytest.mark.parametrize("measure", ["flows", "bytes"])
def test_flows_without_a_way_wait_while_the_site_is_closed(tmp_path, measure):
    site = TrafficSite.create(tmp_path, TOPOLOGY, measure=measure, clock=SystemClock())
    site.arrive(ring("cut", (0, 4)), stage=ALL, everything=True)
    spines = [f"spine{number}" for number in range(4)]
    site.set_links(down=spines)
    site = reopened(site, tmp_path)
    assert site.planner.routes() == ()
    site.set_links(up=spines[:1])
    site = reopened(site, tmp_path)
    assert {route.path[1] for route in site.planner.routes("cut")} == {"spine0"}
    site.leave("cut")
    site.close()


@pytest.mark.parametrize("measure", ["flows", "bytes"])
def test_a_flow_that_came_back_is_where_it_was_put_after_opening_again(tmp_path, measure):
    site = TrafficSite.create(tmp_path, TOPOLOGY, measure=measure, clock=SystemClock())
    site.arrive(ring("cut", (0, 4)), stage=ALL, everything=True)
    old = {route.path[1] for route in site.planner.routes("cut")}
    site.set_links(down=[f"spine{number}" for number in range(4)])
    site.set_links(up=[next(f"spine{number}" for number in range(4) if f"spine{number}" not in old)])
    before = site.planner.routes("cut")
    assert len(before) == 2
    site = reopened(site, tmp_path)
    assert site.planner.routes("cut") == before
    site.close()


def test_parallel_cables_are_shared_evenly_and_stay(tmp_path):
    topology = clos(ClosShape(hosts=8, hosts_per_leaf=4, spines=1, cables=2))
    site = TrafficSite.create(tmp_path, topology, measure="bytes", clock=SystemClock())
    for number in range(4):
        site.arrive(ring(f"j{number}", (number, 4 + number)), stage=ALL, everything=True)
    site.leave("j1")
    site.leave("j3")
    for number in (1, 3):
        site.arrive(ring(f"j{number}", (number, 4 + number)), stage=ALL, everything=True)
    before = {route.flow: route for route in site.planner.routes()}
    for leaf in ("leaf0", "leaf1"):
        assert sorted(route.cable for route in before.values() if route.path[0] == leaf) == [0, 0, 1, 1]
    site = reopened(site, tmp_path)
    assert {route.flow: route for route in site.planner.routes()} == before
    site.close()


def test_a_job_that_is_cut_off_does_not_keep_others_out(tmp_path):
    site = create(tmp_path)
    site.arrive(ring("cut", (0, 4)), stage=ALL)
    site.set_links(down=[f"leaf0>spine{number}" for number in range(4)])
    assert site.arrive(ring("other", (8, 12)), stage=ALL).applied
    assert history(tmp_path).changes[-1].change == "arrive"
    site.close()


def test_a_job_whose_leaves_no_spine_joins_any_more_does_not_keep_others_out(tmp_path):
    """Both of its leaves have uplinks left, but not over the same spines."""
    site = create(tmp_path)
    site.arrive(ring("apart", (0, 4)), stage=ALL)
    site.set_links(down=["leaf0>spine2", "leaf0>spine3", "spine0>leaf1", "spine1>leaf1"])
    assert site.arrive(ring("other", (1, 8)), stage=ALL).applied
    assert (history(tmp_path).changes[-1].change, history(tmp_path).changes[-1].job) == ("arrive", "other")
    site.close()


def test_flows_that_came_later_keep_their_own_ways(tmp_path):
    """A window that opens when another closes could share its way; a plan in force is not changed by opening it."""
    site = create(tmp_path)
    seats = (Seat(0, "h0"), Seat(1, "h4"))
    early, late = (
        CollectiveUse(name, "send", (0, 1), nbytes, start_s=start, end_s=start + 0.5)
        for name, nbytes, start in (("early", 2e9, 0.0), ("late", 1e9, 0.5))
    )
    for number in range(1, 4):
        site.arrive(ring(f"j{number}", (number, 4 + number)), stage=ALL, everything=True)
    site.arrive(Demand("both", seats, (early, late), 1.0), stage=ALL, everything=True)
    flows = site.planner.flows("both")
    site.planner.leave("both")
    site.planner.arrive("both", flows[:1])
    site.planner.extend("both", flows[1:])
    routes = {route.flow: (route.path, route.cable) for route in site.planner.routes("both")}
    assert len(set(routes.values())) == 2
    site.planner.leave("both")
    site.planner.restore("both", flows, routes=routes)
    assert {route.flow: (route.path, route.cable) for route in site.planner.routes("both")} == routes
    site.close()


def test_directories_that_are_no_site(tmp_path):
    with pytest.raises(UsageError, match="no site"):
        TrafficSite.open(tmp_path, SystemClock())
    Journal.open(tmp_path).close()  # all that is left of a start that was cut off
    create(tmp_path).close()
    with pytest.raises(UsageError, match="already"):
        create(tmp_path)


def test_damaged_files_are_named(tmp_path):
    create(tmp_path).close()
    (kept,) = tmp_path.glob("*.msgpack")
    kept.write_bytes(b"x" + kept.read_bytes()[1:])
    with pytest.raises(RecordError, match="damaged"):
        TrafficSite.open(tmp_path, SystemClock())
    kept.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        TrafficSite.open(tmp_path, SystemClock())


hosts = st.permutations(range(16)).map(lambda found: tuple(found[:4]))
deeds = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, 4), hosts),
    st.tuples(st.just("leave"), st.integers(0, 4), st.just(())),
    st.tuples(st.just("down"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("up"), st.integers(0, 3), st.integers(0, 3)),
)


def test_a_change_names_what_came_back_and_what_is_still_down(tmp_path):
    site = create(tmp_path)
    site.set_links(down=["leaf0>spine1", "spine3"])
    back = site.set_links(up=["leaf0>spine1"])
    assert (back.change, back.reason, back.links) == ("restore", "leaf0>spine1 back", ("spine3",))
    assert change_text(back).endswith("; down now: spine3 [leaf0>spine1 back]")
    site.close()


@pytest.mark.parametrize("names", [{"up": ["leaf0>spine2"]}, {"up": ["spine1"]}, {"down": ["leaf0>spine1"]}])
def test_what_is_so_already_makes_no_version(tmp_path, names):
    site = create(tmp_path)
    site.set_links(down=["leaf0>spine1"])
    told = history(tmp_path).changes
    assert site.set_links(**names) is None
    site.close()
    assert history(tmp_path).changes == told


def test_what_is_so_already_does_not_keep_the_rest_from_changing(tmp_path):
    site = create(tmp_path)
    site.set_links(down=["leaf0>spine1"])
    fail = site.set_links(down=["leaf0>spine1", "spine2"], up=["spine3"])
    assert (fail.change, fail.reason, fail.links) == ("fail", "spine2 down", ("leaf0>spine1", "spine2"))
    site.close()


@given(st.lists(deeds, max_size=12))
@settings(max_examples=10, deadline=None)
def test_any_history_is_replayed_to_the_plan_in_force(tmp_path_factory, history_of_deeds):
    directory = tmp_path_factory.mktemp("site")
    site = create(directory)
    for kind, number, other in history_of_deeds:
        try:
            if kind == "arrive":
                site.arrive(ring(f"j{number}", other), stage=ALL, everything=True)
            elif kind == "leave":
                site.leave(f"j{number}")
            elif kind == "down":
                site.set_links(down=[f"leaf{number}>spine{other}"])
            else:
                site.set_links(up=[f"leaf{number}>spine{other}"])
        except KeepstepError:
            continue
    before = {route.flow: route for route in site.planner.routes()}
    for route in before.values():
        assert all(site.planner.network.alive(a, b) for a, b in zip(route.path, route.path[1:], strict=False))
    site = reopened(site, directory)
    after = {route.flow: route for route in site.planner.routes()}
    site.close()
    assert after == before
