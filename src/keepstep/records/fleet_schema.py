"""The tables of a fleet: names, columns, types and meaning. One place for import, analyses, SQL and documents.

All times are timestamps in microseconds, in UTC, without a zone attached; null is "not known" or "not yet". Ids are
63-bit numbers that depend only on what they name, so that importing the same row again gives the same id.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

__all__ = ["BASE_TABLES", "DERIVED_TABLES", "FLEET_SCHEMA", "TABLES", "Column", "TableShape", "arrow_schema", "empty"]

FLEET_SCHEMA = "1.0"
"""Version of the layout; a reader refuses a newer major version."""

_TIME = pa.timestamp("us")
_KINDS: dict[str, Any] = {
    "id": pa.int64(),
    "int": pa.int32(),
    "long": pa.int64(),
    "text": pa.string(),
    "time": _TIME,
    "flag": pa.bool_(),
    "real": pa.float64(),
}


class Column(msgspec.Struct, frozen=True):
    """One column: its name, its `kind` (id, int, long, text, time, flag, real) and what it says."""

    name: str
    kind: str
    says: str


class TableShape(msgspec.Struct, frozen=True):
    """One table: what a row is, which time decides its month (empty: not partitioned), and its columns."""

    name: str
    row: str
    month_of: tuple[str, ...]
    columns: tuple[Column, ...]


def _columns(text: str) -> tuple[Column, ...]:
    lines = (line.split(None, 2) for line in text.strip().splitlines())
    return tuple(Column(name, kind, says) for name, kind, says in lines)


_ATTEMPTS = """
attempt_id      id    of cluster, job, submit and start
cluster         text  name of the cluster; empty: not said by the source
job_id          text  as people write it: 1234, 1234_5 (array), 1234+1 (heterogeneous), or a pod or trace id
job_number      long  raw number of the scheduler; null where ids are no numbers
array_job       long  number of the array it belongs to
array_task      long  index in that array
het_job         long  number of the heterogeneous job it is a part of
het_offset      int   which part
name            text  name of the job
user            text  who submitted it
account         text  who pays
partition       text  partition or queue
qos             text  quality of service
group_key       text  group defined by the user: `run` in a JSON comment, else empty
state           text  COMPLETED FAILED CANCELLED TIMEOUT PREEMPTED NODE_FAIL OUT_OF_MEMORY REQUEUED RESIZING RUNNING ...
cancelled_by    text  who cancelled it; empty: nobody or not said
exit_code       int   exit code of the job's script
exit_signal     int   signal that ended the job's script
derived_code    int   highest exit code of the steps
derived_signal  int   signal of that step
submit          time  when this life was submitted (Slurm writes it anew at each requeue)
eligible        time  when nothing but resources stood in its way
start           time  when the allocation began
end             time  when it ended; null: it has not, or nobody knows
last_seen       time  `end`, or else the last moment at which it was known to run
suspended_us    long  time in which it was suspended [us]
timelimit_us    long  longest time allowed [us]; null: unlimited or not said
gpus            long  GPUs allocated; null: not said
gpus_asked      long  GPUs asked for
node_count      int   nodes allocated (asked for while it is pending)
cpus            long  CPUs allocated
nodes           text  allocated nodes as Slurm writes them: n[1-4,7]
failed_node     text  node that failed, as the scheduler says
restarts        int   restarts the scheduler counts
priority        long  priority of the scheduler
reason          text  why it waited
comment         text  comment of the user, at most 1000 characters
time_note       text  what is odd about the times; empty: nothing
source_id       id    source the row came from
"""
_STEPS = """
step_id      id    of job, step and start
cluster      text  name of the cluster
job_id       text  job it belongs to
job_number   long  raw number of that job
step         text  batch, extern, 0, 1, ...
name         text  name of the step
state        text  as for attempts
exit_code    int   exit code
exit_signal  int   signal; 125 is Slurm's mark for out of memory
start        time  begin
end          time  end
nodes        text  nodes of the step
source_id    id    source the row came from
"""
_ATTEMPT_NODES = """
attempt_id  id    the attempt
node        text  one node of its allocation
gpus        real  GPUs on that node (an equal share where the source does not say)
"""
_NODE_INTERVALS = """
interval_id  id    of node, kind and start
cluster      text  name of the cluster
node         text  node
kind         text  down, drain, maintenance, fault, failing, reserved or other
state_raw    text  state as the source writes it
reason       text  reason as the source writes it
set_by       text  who set it
start        time  begin (of a drain: when it was set where the source says so, else when it took effect)
end          time  end; null: still open
level        text  Hardware Failure, Software Failure ... where the source classes faults
class        text  GPU, Parameter Plane Cable, ...
description  text  fault in the words of the source
start_note   text  what is odd about the start; empty: nothing
source_id    id    source the row came from
"""
_HEALTH = """
result_id  id    of node, check, device and time
cluster    text  name of the cluster
node       text  node that was checked
device     text  GPU, port or interface; empty: the node
check      text  name of the check
time       time  when
status     int   0 OK, 1 WARN, 2 CRITICAL, 3 UNKNOWN
severity   text  high (evict at once), low (drain after the job) or empty
xid        int   XID of the GPU driver
job_id     text  job on the node where the check says so
phase      text  prolog, epilog, periodic, diagnostic or empty
tool       text  nhc, gcm, dcgm, ...
message    text  what it said
source_id  id    source the row came from
"""
_INCIDENTS = """
incident_id       id    of job, attempt and number
cluster           text  name of the cluster
job               text  the job as keepstep calls it
scheduler_job     text  id of the scheduler's job where known
attempt           int   whole restarts before it
number            int   counts the job's incidents from 1
kind              text  class of the fault
layer             text  where the cause lies
rank              int   rank that was lost or is at fault
node              text  its node
device            text  its accelerator
op                text  collective that waited
group             text  its process group
sequence          long  its number in the group
step              long  step that was cut
generation        int   membership in which it happened
finished          text  ranks that had finished or were not waiting, comma separated
waiting           text  ranks that waited, comma separated
link              text  link or path at fault; empty: none named
excluded          text  members, ranks or nodes that were shut out
next_step         long  first step kept after it
remedy            text  what was done, or the probe to run next
onset             time  first collective that left its pattern
detected_us       long  from onset [us]; null: not reached or not known; so are all that follow
decided_us        long  the order to change was given [us]
fenced_us         long  the old member can do nothing any more [us]
standby_chosen_us long  the joiner was chosen [us]
warmed_us         long  the joiner was ready to take state [us]
connected_us      long  links to the joiner were up [us]
copied_us         long  the joiner held the state [us]
joined_us         long  the new generation was ordered to run [us]
first_valid_us    long  the first step after it was kept [us]
steps_recomputed  long  kept steps that were done again
bytes_moved       long  state moved to joiners [B]
members_changed   int   members replaced; 0 with an end: a false alarm
drill             flag  injected on purpose
evidence          text  what leads to the finding, one point a line
source_id         id    source the row came from
"""
_PROGRESS = """
cluster        text  name of the cluster
job            text  the job as keepstep or the training log calls it
scheduler_job  text  id of the scheduler's job where known
attempt        int   whole restarts before it
time           time  when
what           text  started, step, checkpoint, validation_start, validation_end, compile_start, compile_end, ended
step           long  last kept step
step_us        long  time of one step [us]
tokens         long  tokens trained so far
members        int   ranks alive
standbys       int   standbys ready
source_id      id    source the row came from
"""
_POLICY = """
cluster    text  name of the cluster; empty: all
scope      text  partition, symptom or other part it holds for; empty: all
mode       text  off, observe, after_job, at_checkpoint or automatic
version    text  version of the policy
start      time  from
end        time  to; null: still
source_id  id    source the row came from
"""
_CAPACITY = """
cluster    text  name of the cluster
start      time  from
end        time  to; null: still
gpus       long  GPUs registered
node_count int   nodes registered
cpus       long  CPUs registered
source_id  id    source the row came from
"""
_INVENTORY = """
cluster    text  name of the cluster
node       text  node
gpus       int   GPUs it has
state      text  state when seen
features   text  features, comma separated
partitions text  partitions, comma separated
boot       time  last boot
source_id  id    source the row came from
"""
_SUMMARIES = """
cluster    text  cluster the figures are about
figure     text  name of the figure as the source writes it
value      real  the figure
source_id  id    source the row came from
"""
_ASIDE = """
source_id  id    source
line       long  line (or element) in it, from 1
reason     text  why it was not understood
excerpt    text  its beginning, at most 200 characters
"""
_FACTS = """
attempt_id     id    the attempt (one row for each)
run_id         id    job run it belongs to
life           int   its place in the run, from 0
ending         text  completed, failed, requeued, resized, cancelled, timeout, preempted, running, pending or unknown
cause          text  name of the cause in the taxonomy; empty where nothing went wrong
owner          text  user_program, system_software, hardware, network, storage, scheduler, operator or unknown
failed         flag  it ended NODE_FAIL, FAILED, OUT_OF_MEMORY, BOOT_FAIL, LAUNCH_FAILED, or requeued by a failure
infrastructure flag  a failure that is not the user's (numerator of failure rates)
independent    flag  first of its event and no repeat of a crash loop or of a user's retry: count these
repeat_of      id    earlier attempt of the run that failed the same way; null: none
event_id       id    physical event that ended it; null: none
first_cause    flag  it is the first attempt its event ended
victim_of      id    failed attempt whose restart made the scheduler preempt this one (second order)
preempted_by   id    attempt that took its place, where that can be told
evidence       text  what the cause was read from
"""
_RUNS = """
run_id       id    the job run
cluster      text  name of the cluster
name         text  name of the job
user         text  who
account      text  who pays
partition    text  partition of its first attempt
qos          text  quality of service of its first attempt
group_key    text  group defined by the user
attempts     int   lives, requeues and retries together
requeues     int   lives that the scheduler started again
retries      int   submissions by the user after a failure
failures     int   attempts that failed
independent  int   failures that count as independent
preemptions  int   times it was preempted
crash_loop   flag  it failed the same way at least 3 times in a row
gpus         long  most GPUs of an attempt
node_count   int   most nodes of an attempt
submit       time  first submission
start        time  first start
end          time  last end; null: it goes on
state        text  state of the last attempt
allocated_us long  sum of allocated wall-clock time [us]
gpu_us       long  sum of GPUs x allocated time [GPU-us]
"""
_EVENTS = """
event_id     id    the physical event
cluster      text  name of the cluster
time         time  when the first attempt ended
cause        text  name of the cause
owner        text  owner of the cause
nodes        text  nodes it is pinned to, comma separated
attempts     int   attempts it ended
first        id    the first of them
gpus         long  GPUs of all of them
interval_id  id    node interval it was matched with
result_id    id    health result it was matched with
"""

_SHAPES = (
    TableShape("attempts", "one life of one job in the scheduler", ("submit", "start"), _columns(_ATTEMPTS)),
    TableShape("steps", "one step of a Slurm job", ("start",), _columns(_STEPS)),
    TableShape("attempt_nodes", "one node of one attempt", (), _columns(_ATTEMPT_NODES)),
    TableShape("node_intervals", "a time in which a node was not good", ("start",), _columns(_NODE_INTERVALS)),
    TableShape("health_results", "one result of one health check", ("time",), _columns(_HEALTH)),
    TableShape("incidents", "one loss and its repair, or one finding", ("onset",), _columns(_INCIDENTS)),
    TableShape("progress", "a sample of a training run", ("time",), _columns(_PROGRESS)),
    TableShape("policy_modes", "a time in which a policy mode was in force", (), _columns(_POLICY)),
    TableShape("capacity", "a time in which a cluster had a size", (), _columns(_CAPACITY)),
    TableShape("inventory", "a node as it was last seen", (), _columns(_INVENTORY)),
    TableShape("summaries", "a published figure about a cluster", (), _columns(_SUMMARIES)),
    TableShape("kept_aside", "a row that was not understood", (), _columns(_ASIDE)),
    TableShape("attempt_facts", "what was derived about one attempt", (), _columns(_FACTS)),
    TableShape("job_runs", "attempts that are one piece of work", (), _columns(_RUNS)),
    TableShape("failure_events", "one physical event that ended attempts", (), _columns(_EVENTS)),
)
TABLES: dict[str, TableShape] = {shape.name: shape for shape in _SHAPES}
"""All tables by name."""
DERIVED_TABLES = ("attempt_nodes", "attempt_facts", "job_runs", "failure_events")
"""Tables made from the others after every import."""
BASE_TABLES = tuple(name for name in TABLES if name not in DERIVED_TABLES)
"""Tables that hold what sources said."""


def arrow_schema(table: str) -> pa.Schema:
    """The Arrow schema of `table`. Raises KeyError for a name that is no table."""
    return pa.schema([(column.name, _KINDS[column.kind]) for column in TABLES[table].columns])


def empty(table: str) -> pa.Table:
    """`table` without rows."""
    return arrow_schema(table).empty_table()
