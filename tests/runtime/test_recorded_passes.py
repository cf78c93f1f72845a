"""Passes of pipelines that are recorded and replayed leave what eager ones leave, whatever the loop does between steps.

Without a GPU a recording is done again by Python, into the tensors of the first time (:mod:`runtime.test_replay`).
"""

from __future__ import annotations

import copy

import pytest
import torch

from runtime.pipelines import halves, pipeline_plan
from runtime.test_pipeline import example, four_stages
from runtime.test_replay import Again
from shardwright.runtime import parallelize
from shardwright.runtime.recorded_passes import PassReplay
from shardwright.runtime.shards import whole

STEPS = 12


def trained(model, batches) -> list[torch.Tensor]:
    """Steps of every kind after the passes were recorded: gradients left and added to, accumulation, freezing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        frozen = [p for n, p in model.named_parameters() if n == "left.weight"]
        if step in (9, 10):
            for parameter in frozen:
                parameter.requires_grad_(step == 10)
        if step == 7 and hasattr(model, "no_sync"):
            with model.no_sync():
                model(*batches[0])["loss"].backward()
        elif step == 7:
            model(*batches[0])["loss"].backward()
        found = model(*batches[step % 2])
        (3 * found["loss"] if step == 8 else found["loss"]).backward()
        losses.append(found["loss"].detach().clone())
        if step == 6:
            with torch.no_grad():
                losses.append(model(*batches[1])["loss"].clone())
        optimizer.step()
        if step != 5:  # once the gradients are left, and the next ones are added to them
            optimizer.zero_grad()
    return losses


class Breaking(Again):
    """The recording of every pass after the first few breaks off."""

    def record(self, work, draws=False):
        made = super().record(work)
        self.windows += 1
        if self.windows > 3:
            raise torch.cuda.OutOfMemoryError("no 12 bytes")
        return made


def same_as_one_process(rank: int, schedule: str, count: int, each: int, inside: str, breaking: bool = False) -> int:
    model, args, graph = example(8)
    batches = [args, (args[0].flip(0), args[1].flip(1))]
    reference = copy.deepcopy(model)
    wanted = trained(reference, batches)
    cuts = four_stages(graph) if each == 1 else halves(graph, 2)
    plan = pipeline_plan(graph, cuts, count, schedule, each, inside=inside)
    parallel = parallelize(model, plan, graph=graph, keep=True, device="cpu")
    execution, recorder = parallel._planned, Breaking() if breaking else Again()
    execution.recorded = PassReplay(execution.parts, parallel.pipeline.micro.sizes, recorder)
    found = trained(parallel, batches)
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-9, atol=1e-12)
    truth = dict(reference.named_parameters(remove_duplicate=False))
    for path, parameter in parallel.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(whole(parameter.detach()), truth[path].detach(), rtol=1e-9, atol=1e-12)
    return parallel._planned.recorded.replays


@pytest.mark.parametrize(
    ("schedule", "count", "each", "inside"),
    [("zb-h1", 4, 1, "alone"), ("1f1b", 3, 1, "alone"), ("zb-h1", 4, 2, "data"), ("gpipe", 2, 2, "tensor")],
)
def test_replayed_passes_train_as_eager_ones(pool, schedule, count, each, inside):
    for replays in pool.run(same_as_one_process, schedule, count, each, inside):
        assert replays >= 3


def test_a_recording_that_breaks_off_leaves_eager_passes(pool):
    assert pool.run(same_as_one_process, "1f1b", 3, 1, "alone", True) == [0, 0, 0, 0]
