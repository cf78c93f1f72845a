"""The engine never beats its lower bound and never loses to doing one thing after the other."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.simulator.engine import Processor, critical_path, lower_bound, run


@dataclass(frozen=True)
class Task:
    stream: str
    seconds: float
    host: float = 0.0
    after: tuple[int, ...] = ()


@st.composite
def task_lists(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for i in range(draw(st.integers(0, 25))):
        earlier = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        stream = draw(st.sampled_from("abc"))
        seconds, host = draw(st.floats(0, 5)), draw(st.sampled_from([0.0, 0.0, 0.5]))
        tasks.append(Task(stream, seconds, host, tuple(sorted(earlier))))
    return tasks


@given(task_lists())
@settings(max_examples=200, deadline=None)
def test_between_the_bounds(tasks: list[Task]) -> None:
    schedule = run(tasks)
    total = sum(task.seconds + task.host for task in tasks)
    assert lower_bound(tasks) <= schedule.seconds + 1e-9
    assert schedule.seconds <= total + 1e-9


@given(task_lists())
@settings(max_examples=200, deadline=None)
def test_nothing_starts_too_early(tasks: list[Task]) -> None:
    schedule = run(tasks)
    last: dict[str, float] = {}
    for i, task in enumerate(tasks):
        assert schedule.starts[i] >= max((schedule.ends[j] for j in task.after), default=0.0)
        assert schedule.starts[i] >= last.get(task.stream, 0.0)
        assert schedule.starts[i] >= schedule.issued[i]
        last[task.stream] = schedule.ends[i]


@given(task_lists(), st.integers(0, 24), st.floats(0, 3))
@settings(max_examples=100, deadline=None)
def test_more_work_never_ends_earlier(tasks: list[Task], which: int, more: float) -> None:
    if not tasks:
        return
    which %= len(tasks)
    slower = list(tasks)
    slower[which] = Task(tasks[which].stream, tasks[which].seconds + more, tasks[which].host, tasks[which].after)
    assert run(slower).seconds >= run(tasks).seconds - 1e-9


def test_independent_streams_overlap_and_a_slow_host_rules() -> None:
    both = [Task("a", 2.0), Task("b", 3.0), Task("a", 1.0, after=(1,))]
    assert run(both).ends == (2.0, 3.0, 4.0)
    assert critical_path(both) == 4.0
    small = [Task("a", 0.1, host=1.0) for _ in range(5)]
    assert run(small).seconds == 5.1
    assert lower_bound(small) == 5.0


def test_a_processor_that_communicates_computes_more_slowly() -> None:
    network = [Task("net", 2.0), Task("cpu", 1.0), Task("net", 1.0, after=(1,)), Task("cpu", 4.0)]
    ends = run(network, Processor("cpu", {"net": 0.25})).ends
    assert ends[:3] == (2.0, 1 / 0.75, 3.0)
    assert ends[3] == 3.0 + 4.0 - 0.75 * (3.0 - 1 / 0.75)  # at three quarters of its speed until the network is idle


def test_a_short_collective_takes_the_processor_for_as_long_as_it_must() -> None:
    ends = run([Task("net", 1.0), Task("cpu", 1.0)], Processor("cpu", {"net": 0.0}, {"net": 0.5})).ends
    assert ends == (1.0, 0.5 + 1.0 - 0.5 * 0.1)  # computation never stops altogether


@given(task_lists(), st.floats(0.05, 0.45), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_sharing_a_processor_costs_what_overlap_gained_at_most(tasks: list[Task], share: float, first: float) -> None:
    alone = run(tasks).seconds
    shared = run(tasks, Processor("a", {"b": share, "c": share}, {"b": first})).seconds
    assert alone - 1e-9 <= shared <= sum(task.seconds + task.host for task in tasks) + 1e-9
