"""Passes of pipelines that are recorded and replayed leave what eager ones leave, whatever the loop does between steps.

Without a GPU a recording is done again by Python, into the tensors of the first time (:mod:`runtime.test_replay`).
"""

from __future__ import annotations

import copy

import pytest
import torch

from runtime.pipelines import halves, pipeline_plan
from runtime.test_pipeline import example, four_stages
from runtime.test_replay import Again, recorded_by
from shardwright.frontend import capture
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole

STEPS = 14


def trained(model, batches, others: bool = False) -> list[torch.Tensor]:
    """Steps of every kind after the passes were recorded: gradients left and added to, accumulation, freezing, calls that
    wait for their backward passes together. ``others``: passes back from other outputs, too."""
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
        if step == 11:
            (model(*batches[0])["loss"] + found["loss"]).backward()
        elif step == 12 and others:
            found["logits"].square().mean().backward()
        else:
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
    """The recording breaks off in one of its passes."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def record(self, work, draws=False):
        made = super().record(work)
        if len(self.records) > self.at:
            raise torch.cuda.OutOfMemoryError("no 12 bytes")
        return made


def same_as_one_process(
    rank: int, schedule: str, count: int, each: int, inside: str, breaks: int | None = None
) -> tuple[int, int, list[int], list[int]]:
    """How many steps were replayed, how many passes a step has, the windows of each, and the order of replays."""
    model, args, graph = example(8)
    batches = [args, (args[0].flip(0), args[1].flip(1))]
    reference = copy.deepcopy(model)
    wanted = trained(reference, batches, schedule == "gpipe")
    cuts = four_stages(graph) if each == 1 else halves(graph, 2)
    plan = pipeline_plan(graph, cuts, count, schedule, each, inside=inside)
    parallel = parallelize(model, plan, graph=graph, keep=True, device="cpu")
    execution, recorder = parallel._planned, Again() if breaks is None else Breaking(breaks)
    recorded_by(execution, recorder)
    found = trained(parallel, batches, schedule == "gpipe")
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-9, atol=1e-12)
    truth = dict(reference.named_parameters(remove_duplicate=False))
    for path, parameter in parallel.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(whole(parameter.detach()), truth[path].detach(), rtol=1e-9, atol=1e-12)
    return execution.recorder.replays, len(execution.order), recorder.records, recorder.replayed


@pytest.mark.parametrize(
    ("schedule", "count", "each", "inside"),
    [("zb-h1", 4, 1, "alone"), ("1f1b", 3, 1, "alone"), ("zb-h1", 4, 2, "data"), ("gpipe", 2, 2, "tensor")],
)
def test_replayed_passes_train_as_eager_ones(pool, schedule, count, each, inside):
    for replays, passes, windows, _ in pool.run(same_as_one_process, schedule, count, each, inside):
        assert replays >= 3
        assert len(windows) == passes + 1  # of every pass and of the reduction the memory is planned,
        assert windows.count(1) <= (count if schedule == "zb-h1" else 0)  # but where no gradient of an input is wanted


@pytest.mark.parametrize("at", [0, 2, 6])
def test_a_recording_that_breaks_off_leaves_eager_passes(pool, at):
    """In the first pass, amid the others, in the reduction."""
    for replays, passes, windows, replayed in pool.run(same_as_one_process, "1f1b", 3, 1, "alone", at):
        assert (replays, passes, len(windows), replayed) == (0, 6, at + 1, [])


class Logits(torch.nn.Module):
    """A language model in small that draws random numbers, without a loss."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.embedding, self.drop = torch.nn.Embedding(31, 16), torch.nn.Dropout(rate)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.drop(layer(x).relu())
        return x


def logits(rank: int, rate: float, schedule: str, count: int, stages: int, inside: str) -> tuple[int, int, list[int]]:
    """Without a loss in the model forward passes come first, whatever the schedule; replayed they draw as eager ones."""
    torch.manual_seed(0)
    tokens = torch.randint(31, (8, 5))
    graph = capture(Logits(rate).double(), (tokens,))
    plan = pipeline_plan(graph, halves(graph, stages), count, schedule, 4 // stages, inside=inside)
    found = []
    for recorder in (None, Again()):
        torch.manual_seed(1)
        parallel = parallelize(Logits(rate).double(), plan, graph=graph, device="cpu")
        if recorder is not None:
            recorded_by(parallel._planned, recorder)
        losses = []
        for step in range(8):
            parallel.zero_grad()
            torch.manual_seed(step)
            out = parallel(tokens)
            loss = torch.nn.functional.cross_entropy(out.flatten(0, 1)[:, :16], tokens.flatten() % 16)
            loss.backward()
            losses += [loss.detach(), *(whole(p.grad).norm() for p in parallel.parameters())]
        found.append(torch.stack(losses))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert not rate or len(found[0].unique()) > len(found[0]) // 2
    return parallel._planned.recorder.replays, len(parallel._planned.order), recorder.replayed


@pytest.mark.parametrize(
    ("rate", "schedule", "count", "stages", "inside"),
    [
        (0.0, "1f1b", 4, 4, "alone"),
        (0.5, "1f1b", 4, 2, "data"),
        (0.5, "zb-h1", 4, 4, "alone"),
        (0.5, "gpipe", 2, 1, "data"),
    ],
)
def test_replays_come_in_the_order_of_the_recording_and_draw_as_eager_passes(
    pool, rate, schedule, count, stages, inside
):
    for replays, passes, replayed in pool.run(logits, rate, schedule, count, stages, inside):
        assert replays == 5 and replayed == [*range(passes + 1)] * replays
