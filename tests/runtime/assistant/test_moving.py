"""Shares of the batch moved while a model trains: losses, parameters and buffers stay those of one process."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from lowering.strategies import mesh_with
from runtime.pipelines import pipeline_plan
from runtime.pool import POOL
from runtime.workers import built, device_mesh
from shardwright import waiting
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.graph.repeats import block_paths, span_of
from shardwright.plans import Plan
from shardwright.runtime import parallelize
from shardwright.runtime.assistant import Assistant, assist, changing, clocks, drop_ranks, links
from shardwright.runtime.assistant import assistant as acting
from shardwright.runtime.assistant.starting import ASSIST_VARIABLE
from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from shardwright.runtime.shards import whole
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.verification.prepare import all_double

Subject = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
YARDSTICK = drop_ranks.reference_speed


@functools.cache
def gpt() -> Subject:
    return built("gpt:small,layers=1,batch=8")


@functools.cache
def heads() -> Subject:
    return built("gpt:small,layers=1,heads=8,batch=2")


@functools.cache
def images() -> Subject:
    """Statistics of the whole batch, kept from step to step."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    model, args = nn.Sequential(*layers).double(), (torch.randn(12, 3, 8, 8, dtype=torch.float64),)
    return model, args, {}, capture(model, args)


@functools.cache
def drawing() -> Subject:
    """Its dropout draws from the random numbers of the ranks."""
    torch.manual_seed(0)
    model, args = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double(), (torch.randn(8, 6, dtype=torch.float64),)
    return model, args, {}, capture(model, args)


def assisted(
    subject: Subject, search: str, sizes: tuple[int, ...], **options: Any
) -> tuple[Any, torch.optim.Optimizer, Assistant]:
    model, args, kwargs, graph = subject
    stated = formulate(graph, mesh_with(sizes), within=restriction(search, len(sizes)))
    strategy = stated.strategy(solve(stated.problem).answer)
    mesh = device_mesh(sizes)
    with all_double():
        parallel = parallelize(model, strategy, args, kwargs, mesh=mesh, graph=graph, keep=True, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
    return parallel, optimizer, assist(parallel, optimizer)


def step(model: Any, optimizer: torch.optim.Optimizer, subject: Subject) -> float:
    with all_double():
        loss = model(*subject[1], **subject[2])
        loss = loss if not loss.ndim else loss.square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def farthest(parallel: Any, model: nn.Module) -> float:
    """Of all parameters and buffers, relative to the largest element of each."""
    own = {**dict(parallel.named_parameters()), **dict(parallel.named_buffers())}
    far = 0.0
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_floating_point():
            far = max(far, float((whole(own[name]) - x).abs().max() / x.abs().max().clamp(min=1e-3)))
    return far


def random_rows(random: Random, assistant: Assistant) -> list[int]:
    rows, unit = assistant.rows, assistant._movers[0].mover.shares.unit
    borders = sorted(random.sample(range(1, sum(rows) // unit), len(rows) - 1))
    return [unit * (b - a) for a, b in zip([0, *borders], [*borders, sum(rows) // unit], strict=True)]


def trained(
    rank: int, make: Callable[[], Subject], search: str, sizes: tuple[int, ...], moves: int, traces: bool
) -> tuple[float, float]:
    subject = make()
    parallel, optimizer, assistant = assisted(subject, search, sizes)
    assistant._movers[0].mover.traces = traces
    alone = copy.deepcopy(subject[0])
    single = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    random, far = Random(5), abs(step(parallel, optimizer, subject) - step(alone, single, subject))
    for _ in range(moves):
        rows = random_rows(random, assistant)
        assert assistant.move(rows) and list(assistant.rows) == rows
        far = max(far, abs(step(parallel, optimizer, subject) - step(alone, single, subject)))
    assistant.leave()
    return far, farthest(parallel, alone)


@pytest.mark.parametrize(
    ("make", "search", "sizes", "moves", "traces"),
    [
        pytest.param(gpt, "data-parallel", (4,), 20, False, id="20 moves in a row"),
        pytest.param(images, "data-parallel", (4,), 5, False, id="statistics of the whole batch"),
        pytest.param(gpt, "megatron", (2, 2), 2, True, id="replicas of tensor-parallel groups, traced"),
        pytest.param(gpt, "data-parallel", (2, 2), 3, False, id="two axes cut the batch"),
        pytest.param(gpt, "fsdp", (4,), 3, False, id="gathered parameters"),
        pytest.param(heads, "megatron", (4,), 10, False, id="10 moves of weights in a row"),
    ],
)
def test_moves_keep_the_numbers(
    make: Callable[[], Subject], search: str, sizes: tuple[int, ...], moves: int, traces: bool
) -> None:
    for losses, parameters in POOL.run(trained, make, search, sizes, moves, traces, seconds=200):
        assert losses < 1e-9 and parameters < 1e-9


def stored(rank: int, folder: str) -> list[float]:
    """Written while heads lie 5, 1, 1, 1, and read where they lie equally; then the other way round."""
    subject, far = heads(), []
    moved, optimizer, first = assisted(subject, "megatron", (4,))
    even, other, second = assisted(subject, "megatron", (4,))
    step(moved, optimizer, subject)
    first.move((5, 1, 1, 1))
    step(moved, optimizer, subject)
    for source, target, number in ((moved, even, 1), (even, moved, 2)):
        pair = (optimizer, other) if number == 1 else (other, optimizer)
        save_checkpoint(folder, number, source, pair[0])
        load_checkpoint(folder, target, pair[1])
        alone = copy.deepcopy(subject[0])
        for name, x in alone.named_parameters():
            x.data = whole(dict(source.named_parameters())[name].detach())
        far += [farthest(target, alone), abs(step(source, pair[0], subject) - step(target, pair[1], subject))]
    first.leave()
    second.leave()
    return far


def test_a_checkpoint_after_a_move_is_read_under_either_cut(tmp_path: Path) -> None:
    """Momentum included: the next step has the same loss under both."""
    assert all(max(far) < 1e-9 for far in POOL.run(stored, str(tmp_path)))


def drawn(rank: int) -> list[float]:
    subject = drawing()
    parallel, optimizer, assistant = assisted(subject, "data-parallel", (4,))
    losses = []
    torch.manual_seed(3)
    for rows in ((2, 2, 2, 2), (5, 1, 1, 1), (1, 3, 1, 3), (2, 2, 2, 2)):
        assistant.move(rows)
        losses.append(step(parallel, optimizer, subject))
    assistant.leave()
    return losses


def test_random_numbers_go_on_where_they_were() -> None:
    """Building a program draws none, ranks stay in step, and the same moves from the same seed give the same losses."""
    first, second = POOL.run(drawn), POOL.run(drawn)
    assert first == second and all(losses == first[0] for losses in first)
    assert len(set(first[0])) == 4


def linked(rank: int) -> tuple[float, list[str], tuple[Any, ...]]:
    """Every rank waits 10 ms for its link in a step, and from the twentieth on ten times as long."""
    subject, now = heads(), [0.0]
    clocks.perf_counter = acting.perf_counter = links.perf_counter = lambda: now[0]
    model, args, kwargs, graph = subject
    stated = formulate(graph, mesh_with((4,)), within=restriction("megatron", 1))
    strategy = stated.strategy(solve(stated.problem).answer)
    plan = Plan.of(graph, strategy, optimizer="sgd")
    with all_double():
        parallel = parallelize(model, plan, args, kwargs, graph=graph, keep=True)
    optimizer, alone = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9), copy.deepcopy(model)
    single, assistant = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9), assist(parallel, optimizer)
    slower = 1.0

    def wait(*_: Any) -> None:
        now[0] += 0.02
        assistant._clock.wait_begins()
        now[0] += 0.01 * slower
        assistant._clock.wait_ended()

    parallel.register_forward_pre_hook(wait)
    far = 0.0
    for number in range(40):
        slower = 10.0 if number >= 20 else 1.0
        far = max(far, abs(step(parallel, optimizer, subject) - step(alone, single, subject)))
    assistant.leave()
    clocks.perf_counter = acting.perf_counter = links.perf_counter = time.perf_counter
    return far, [str(event) for event in assistant.events], parallel.program.strategy.axes


def test_a_slow_link_is_answered_by_another_plan() -> None:
    """Simulated to be faster there, and with the numbers of one process before and after."""
    answers = POOL.run(linked, seconds=200)
    assert all(far < 1e-9 for far, _, _ in answers)
    changed = [text for text in answers[0][1] if "went over to another plan" in text]
    assert len(changed) == 1 and changed[0].startswith("links are 10 × slower than planned since step")


def refused(rank: int) -> list[str]:
    subject, found = drawing(), []
    _, _, assistant = assisted(subject, "data-parallel", (4,))
    for rows in ((8, 0, 0, 0), (4, 4), (3, 3, 3, 3)):
        with pytest.raises(RunError) as caught:
            assistant.move(rows)
        found.append(caught.value.message)
    assistant.leave()
    with pytest.raises(RunError) as caught:
        assisted(subject, "data-parallel", (4,), inputs="local")
    found.append(caught.value.message)
    with pytest.raises(RunError) as caught:
        assisted(gpt(), "megatron", (4,))
    found.append(caught.value.message)
    with pytest.raises(RunError) as caught:
        assist(subject[0])
    return [*found, caught.value.message]


def test_what_cannot_be_moved_is_refused() -> None:
    for *rows, local, used, plain in POOL.run(refused):
        assert all("do not share out 8 rows between 4" in message for message in rows)
        assert "its own part of the batch" in local
        assert "is used cut along axis 'a'" in used
        assert "not a parallelized module" in plain


def held_back(rank: int) -> str:
    subject = drawing()
    parallel, _, assistant = assisted(subject, "data-parallel", (4,))
    with parallel.no_sync():
        parallel(*subject[1]).sum().backward()
    with pytest.raises(RunError) as caught:
        assistant.move((3, 3, 1, 1))
    parallel(*subject[1]).sum().backward()
    assistant.move((3, 3, 1, 1))
    assistant.leave()
    return caught.value.message


def test_gradients_that_are_held_back_keep_their_shares() -> None:
    assert all("held back by no_sync()" in message for message in POOL.run(held_back))


def staged(stages: int = 4) -> tuple[Subject, Any, torch.optim.Optimizer, Assistant]:
    """Four stages with two blocks each, or two with two replicas each."""
    subject = built("gpt:small,layers=8,batch=4" if stages == 4 else "gpt:small,layers=2,batch=8")
    model, args, kwargs, graph = subject
    starts = [span_of(graph, path).start for path in block_paths(graph)]
    apart = len(starts) // stages
    cuts = [[op.name for op in graph.ops[a:b]] for a, b in pairwise([0, *starts[apart::apart], len(graph.ops)])]
    plan = pipeline_plan(graph, cuts, 2, "1f1b", 4 // stages, inside="data" if stages < 4 else "alone")
    with all_double():
        parallel = parallelize(model, plan, args, kwargs, graph=graph, keep=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
    return subject, parallel, optimizer, assist(parallel, optimizer)


def asked_for(rank: int, stages: int) -> list[int]:
    """Hooks of the module before and after its first step, where ``shardwright run --assist`` asked for an assistant."""
    os.environ[ASSIST_VARIABLE] = "watch"
    try:
        subject, parallel, optimizer, assistant = staged(stages)
        assistant.leave()
        before = len(parallel._forward_pre_hooks)
        step(parallel, optimizer, subject)
        return [before, len(parallel._forward_pre_hooks)]
    finally:
        del os.environ[ASSIST_VARIABLE]
        waiting._CLOCKS.clear()  # nobody ends an assistant that the job asked for


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_is_assisted_where_the_job_asks_for_it(stages: int) -> None:
    for before, after in POOL.run(asked_for, stages):
        assert after == before + 1


def slowed(rank: int, what: str) -> Any:
    """Every row takes 15 ms, on rank 1 almost twice as long, until rows have been moved; then no longer.

    Time is the test's own, so that nothing depends on how busy the machine is.
    """
    now = [0.0]
    clocks.perf_counter = acting.perf_counter = lambda: now[0]
    if what == "blocks":
        subject, parallel, optimizer, assistant = staged()
    elif what == "replicas":
        subject, parallel, optimizer, assistant = staged(2)
    else:
        subject = drawing() if what == "rows" else heads()
        search = "data-parallel" if what == "rows" else "megatron"
        parallel, optimizer, assistant = assisted(subject, search, (4,))
    assistant._movers[0].mover.traces = False
    slow = 1.9

    def work(*_: Any) -> None:
        rows = assistant.rows[rank] if rank < len(assistant.rows) else 2
        now[0] += 0.015 * rows * (slow if rank == 1 else 1.0)

    hook = parallel.register_forward_pre_hook(work)
    seen = [assistant.rows]
    for _ in range(150):
        step(parallel, optimizer, subject)
        if assistant.rows != seen[-1]:
            seen.append(assistant.rows)
            if assistant.rows[1] == 1:
                slow = 1.0
            elif len(seen) > 2 and assistant.rows[1] == 2:
                break
    hook.remove()
    assistant.leave()
    clocks.perf_counter = acting.perf_counter = time.perf_counter
    return seen, [(event.event, event.rank, str(event)) for event in assistant.events]


@pytest.mark.parametrize("what", ["rows", "parts", "blocks", "replicas"])
def test_a_slow_rank_gives_work_away_and_gets_it_back(what: str) -> None:
    """The ranks that wait for it are not taken for slow; all ranks decide alike. Replicas are those of a stage: two of them
    share the rows of its micro-batches, the other stage keeps its own."""
    answers = POOL.run(slowed, what, seconds=200)
    assert all(rows == answers[0][0] for rows, _ in answers)
    rows, events = answers[0]
    equal = (2, 2) if what == "replicas" else (2, 2, 2, 2)
    assert rows[0] == equal and (1 in [given[1] for given in rows]) and rows[-1][1] == 2
    moves = [(rank, text) for event, rank, text in events if event == "moved"]
    moved = "1 of 4 rows" if what == "replicas" else f"1 of 8 {what}"
    assert moves[0][0] == 1 and "× slower since step" in moves[0][1] and f"{moved}; step" in moves[0][1]
    assert not any(events for _, events in answers[1:])


def without(rank: int, what: str) -> tuple[float, list[str], list[tuple[int, ...]], int]:
    """Rank 1 is thirty times slower than the others for a while."""
    subject, now, slow = gpt() if what == "rows" else heads(), [0.0], 30.0
    clocks.perf_counter = acting.perf_counter = lambda: now[0]
    changing.reference_speed = drop_ranks.reference_speed = lambda _: 1 / slow
    if what == "blocks":
        subject, parallel, optimizer, assistant = staged()
    else:
        search = "data-parallel" if what == "rows" else "megatron"
        parallel, optimizer, assistant = assisted(subject, search, (4,))
    assistant._movers[0].mover.traces = False
    alone = copy.deepcopy(subject[0])
    single = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)

    def work(*_: Any) -> None:
        own = assistant.rows[min(rank, len(assistant.rows) - 1)] if assistant.rows else 0
        now[0] += 0.2 * own * (slow if rank == 1 else 1.0)

    hook, far, seen, held = parallel.register_forward_pre_hook(work), 0.0, [assistant.left_out], 1
    for _ in range(90):
        far = max(far, abs(step(parallel, optimizer, subject) - step(alone, single, subject)))
        if assistant.left_out != seen[-1]:
            seen.append(assistant.left_out)
            held = min(held, len(list(parallel.parameters())))
            slow = 1.0
        if len(seen) == 3:
            break
    far = max(far, abs(step(parallel, optimizer, subject) - step(alone, single, subject)))
    hook.remove()
    assistant.leave()
    clocks.perf_counter = acting.perf_counter = time.perf_counter
    changing.reference_speed = drop_ranks.reference_speed = YARDSTICK
    return far, [str(e) for e in assistant.events if e.event == "moved"], seen, held


@pytest.mark.parametrize("what", ["rows", "parts", "blocks"])
def test_a_rank_that_is_much_too_slow_is_left_out_and_taken_back(what: str) -> None:
    """It holds nothing meanwhile, is told the losses, and all numbers stay those of one process."""
    answers = POOL.run(without, what, seconds=240)
    assert all(far < 1e-9 and seen == [(), (1,), ()] for far, _, seen, _ in answers)
    assert [held > 0 for *_, held in answers] == [True, False, True, True]
    left, back = answers[0][1]
    assert left.startswith("rank 1 is 3") and " × slower since step" in left and "went on without it" in left
    assert back.startswith("rank 1 is as fast as the others since step") and "took it back" in back
