"""Passes that are recorded and replayed leave what eager ones leave, whatever the loop does between them.

Without a GPU a recording is done again by Python, into the tensors of the first time: what a replay overwrites, and what it
must not overwrite, is as with CUDA graphs.
"""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext

import pytest
import torch

from runtime.test_zero import MODEL, stage
from runtime.workers import built, device_mesh, two_residual_blocks
from shardwright._torch_compat import local_of
from shardwright.cluster import parse_cluster
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize
from shardwright.runtime.optimizers import update_locally
from shardwright.runtime.recorder import StepRecorder
from shardwright.runtime.shards import whole
from shardwright.verification.recorded import loss_of

STEPS = 12


class Again:
    """Records by remembering what was done."""

    def attempt(self):
        self.records = []
        return nullcontext()

    def record(self, work, draws=False):
        """As with CUDA graphs nothing is drawn yet from what eager passes draw from."""
        state, before = torch.get_rng_state(), self.windows
        self.window()
        work()
        torch.set_rng_state(state)
        number, again = len(self.records), copy.copy(self)
        self.records.append(self.windows - before)

        def replay():
            self.replayed.append(number)
            if number == 0:  # whatever lies in the pool may be written over from here on
                made = self.owner._made
                for x in [*(home.gradient for home in made.pooled), *made.totals.values()]:
                    x.fill_(float("nan"))
            work()

        again.replay = replay
        return again

    def apart(self, work):
        work()

    def memory(self):
        return nullcontext()

    def window(self):
        self.windows += 1

    def again(self):
        """As after a rehearsal."""
        self.rehearsed += 1
        return self.rehearsed == 1

    def failed(self, error):
        return False

    windows = rehearsed = 0

    def __init__(self):
        self.replayed = []


def recorded_by(execution, recorder):
    """Let this record the passes."""
    recorder.owner = execution.recorder = StepRecorder(execution.order, execution._largest, recorder)
    return recorder.owner


def loops(model, args, kwargs):
    """A training run in which every kind of step comes after the passes were recorded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses, seen = [], []
    frozen = next(iter(model.parameters()))
    for step in range(STEPS):
        loss = loss_of(model(*args, **kwargs))
        if step == 7:  # two forward passes, the second's backward first
            other = loss_of(model(*args, **kwargs))
            (0.5 * other).backward()
            loss = 0.5 * loss
        if step == 8:
            frozen.requires_grad_(False)
        if step == 9 and hasattr(model, "no_sync"):
            with model.no_sync():
                loss.backward()
            loss = loss_of(model(*args, **kwargs))
        elif step == 9:
            loss.backward()
            loss = loss_of(model(*args, **kwargs))
        loss.backward()
        if step == 10:
            frozen.requires_grad_(True)
        losses.append(loss.detach())
        if step == 4:
            handle = list(model.parameters())[3].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
        if step == 6:
            handle.remove()
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        optimizer.step()
        if step != 5:  # once the gradients are left, and the next ones are added to them
            optimizer.zero_grad()
    assert len(seen) == 2
    return losses


def same_as_one_process(
    rank: int, name: str, sizes: tuple[int, ...], prepare=None, replayed: bool = True, recorder=None
) -> int:
    model, args, kwargs, graph = built(MODEL)
    reference = copy.deepcopy(model)
    update_locally()
    wanted = loops(reference, args, kwargs)
    parallel = parallelize(model, stage(name, sizes), mesh=device_mesh(sizes), graph=graph, keep=True)
    execution = parallel._planned
    if prepare is not None:
        prepare(parallel)
    if replayed:
        recorded_by(execution, recorder or Again())
    found = loops(parallel, args, kwargs)
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-9, atol=1e-12)
    for path, parameter in reference.named_parameters():
        mine = whole(parallel.get_parameter(path).detach())
        torch.testing.assert_close(mine, parameter.detach(), rtol=1e-9, atol=1e-12)
    return 0 if execution.recorder is None else execution.recorder.replays


class Breaking(Again):
    """Every recording breaks off: in its first part, or amid the backward pass while a bucket is being summed."""

    flats = ()

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def window(self):
        if self.where != "summing" or any(flat._reduction is not None for flat in self.flats):
            self.windows += 1
            raise torch.cuda.OutOfMemoryError("no 12 bytes")

    def failed(self, error):
        if self.where == "giving up":
            raise RuntimeError("the history cannot be read")
        return False


def falls_back(rank: int, where: str) -> tuple[int, int, list[str]]:
    said: list[str] = []
    recorder, handler = Breaking(where), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardwright").addHandler(handler)
    try:
        replays = same_as_one_process(
            rank,
            "data-parallel",
            (4,),
            lambda parallel: setattr(recorder, "flats", parallel._planned.executor.flats),
            recorder=recorder,
        )
    finally:
        logging.getLogger("shardwright").removeHandler(handler)
    return replays, recorder.windows, [line for line in said if "CUDA graphs" in line]


@pytest.mark.parametrize("where", ["forward", "summing", "giving up"])
def test_a_recording_that_breaks_off_leaves_eager_passes_and_one_line(pool, where):
    for replays, broken, said in pool.run(falls_back, where):
        assert replays == 0 and broken == 1
        assert len(said) == 1 and said[0].startswith("The step is run without CUDA graphs")


@pytest.mark.parametrize(("name", "sizes"), [("zero1", (4,)), ("zero3", (2, 2))])
def test_replayed_passes_train_as_eager_ones(pool, name, sizes):
    for replays in pool.run(same_as_one_process, name, sizes):
        assert replays >= 5


def residual_blocks():
    """A model as it is, the same on two ranks, and what it is called with."""
    model, args, kwargs, graph = two_residual_blocks()
    reference = copy.deepcopy(model)
    plan = plan_graph(
        graph, parse_cluster("2xH200"), Options(search="data-parallel", baselines=(), fewer_devices=False)
    )
    return reference, parallelize(model, plan, graph=graph, keep=True), args, kwargs, graph


def with_running_statistics(rank: int) -> tuple[int, int]:
    reference, parallel, args, kwargs, _ = residual_blocks()
    execution = parallel._planned
    recorded_by(execution, Again())
    places = {}
    for step in range(STEPS):
        for here in (reference, parallel):
            here.zero_grad()
            loss = here(*args, **kwargs)
            if step == 8:  # a pass of its own between the two: it updates the statistics too
                with torch.no_grad():
                    here(*args, **kwargs)
            loss.backward()
        for path, buffer in reference.named_buffers():
            mine = parallel.get_buffer(path)
            torch.testing.assert_close(whole(mine), buffer, rtol=1e-9, atol=1e-12)
            if step > 8:
                places.setdefault(path, set()).add(local_of(mine).data_ptr())
    return execution.recorder.replays, sum(len(known) > 1 for known in places.values())


def test_replays_update_running_statistics_where_they_lie(pair):
    for replays, moved in pair.run(with_running_statistics):
        assert replays >= 5 and not moved


def with_pictures(rank: int) -> tuple[int, int, bool]:
    """Pictures are turned around where a pass is not replayed, else by the copy into a recording's own tensors."""
    reference, parallel, args, kwargs, graph = residual_blocks()
    execution = parallel._planned
    execution.only.arguments._images = {graph.inputs[0].tensor}
    turned, turn = [], execution.only.laid

    def laid(sources):
        turned.append(len(sources))
        return turn(sources)

    execution.only.laid = laid
    recorder = recorded_by(execution, Again())
    for _ in range(STEPS):
        wanted, found = reference(*args, **kwargs), parallel(*args, **kwargs)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        found.backward()
        parallel.zero_grad()
    (action, _), *_ = execution.order
    own = recorder._made.passes[action].given.sources[graph.sources.index(graph.inputs[0].tensor)]
    return recorder.replays, len(turned), own.is_contiguous(memory_format=torch.channels_last)


def test_replays_turn_pictures_around_by_copying_them(pair):
    for replays, turned, channels_last in pair.run(with_pictures):
        assert replays >= 5 and turned == STEPS - replays + 1 and channels_last  # once for the recording
