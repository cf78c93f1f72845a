"""Pipelines on four processes: the numbers of one process on the whole batch, whatever the stages and their order."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from runtime.pipelines import halves, pipeline_plan
from runtime.pool import POOL
from runtime.workers import built, captured
from shardwright._torch_compat import default_store
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.plans import from_json, to_json
from shardwright.runtime import parallelize
from shardwright.runtime.checkpoint import save_checkpoint
from shardwright.runtime.clipping import clip_gradients
from shardwright.runtime.materialise import parameters_on_meta
from shardwright.runtime.shards import whole
from shardwright.schedules import Schedule
from shardwright.verification.prepare import all_double
from shardwright.verification.verify import verify_rank
from shardwright.zoo.reference import resolve


class Tied(torch.nn.Module):
    """A language model in small: tied embedding, a skip over two stages, two towers, a frozen part, labels to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(31, 12)
        self.left, self.right = torch.nn.Linear(12, 12), torch.nn.Linear(12, 12)
        self.frozen = torch.nn.Linear(12, 12).requires_grad_(False)
        self.deep, self.norm = torch.nn.Linear(12, 12), torch.nn.LayerNorm(12)
        self.head = torch.nn.Linear(12, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens)
        left, right = self.left(x).tanh(), self.right(x).relu()
        unused = left * 2
        deep = self.deep(self.frozen(left + right)).tanh()
        logits = self.head(self.norm(deep + x + left))
        loss = functional.cross_entropy(logits.view(-1, 31), labels.view(-1))
        return {"loss": loss, "logits": logits, "unused": unused}


def example(batch: int = 7) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Tied().double()
    tokens, labels = torch.randint(31, (batch, 5)), torch.randint(31, (batch, 5))
    labels[0], labels[1, 1:], labels[4] = -100, -100, -100  # unevenly
    return model, (tokens, labels), captured(model, (tokens, labels))


def four_stages(graph: Any) -> list[list[str]]:
    """Embedding and left tower, right tower, the middle (frozen and deep), the head: values skip over stages."""
    places = {"": 3, "embedding": 0, "left": 0, "right": 1, "frozen": 2, "deep": 2, "norm": 3, "head": 3}
    cuts: list[list[str]] = [[], [], [], []]
    makers: dict[str, int] = {}
    for op in graph.ops:
        place = places[op.module] if op.module else max((makers.get(n, 0) for n in op.inputs), default=3)
        cuts[place].append(op.name)
        makers |= dict.fromkeys([n for n in op.outputs if n], place)
    return cuts


def compared(
    rank: int, schedules: list[str], counts: list[int], each: int | Sequence[int], seed: int | None
) -> dict[str, float]:
    model, args, graph = example(7 if each == 1 else 8)
    reference = copy.deepcopy(model)
    expected = reference(*args)
    expected["loss"].backward()
    gradients = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False)}
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    worst: dict[str, float] = {}
    for schedule in schedules:
        for count in counts:
            cuts = four_stages(graph) if each == 1 else halves(graph, 2)
            plan = pipeline_plan(graph, cuts, count, schedule, each, seed)
            parallel = parallelize(copy.deepcopy(model), plan, args, graph=graph)
            with torch.no_grad():
                apart = (parallel(*args)["loss"] - expected["loss"]).abs().item()
            for _ in range(2):
                parallel.zero_grad()
                found = parallel(*args)
                found["loss"].backward()
            apart = max(apart, (found["loss"] - expected["loss"]).abs().item())
            for name in ("logits", "unused"):
                apart = max(apart, (found[name] - expected[name]).abs().max().item())
            for name, parameter in parallel.named_parameters():
                if gradients[name] is None:
                    assert parameter.grad is None, name
                else:
                    apart = max(apart, (whole(parameter.grad) - gradients[name]).abs().max().item())
            worst[f"{schedule} {count}"] = max(apart, (clip_gradients(parallel, 1.0) - norm).abs().item())
    return worst


@pytest.mark.parametrize("schedules", [["1f1b", "gpipe"], ["zb-h1", "zb-h2"]])
def test_four_stages_with_skips_towers_ties_and_uneven_labels(schedules: list[str]) -> None:
    for worst in POOL.run(compared, schedules, [2, 3, 7], 1, None, seconds=240):
        assert max(worst.values()) < 1e-12, worst


@pytest.mark.parametrize(("each", "seed"), [(2, None), (2, 1), (2, 2), ((3, 1), 1), ((1, 3), 2)])
def test_stages_split_over_several_ranks_each(each: int | tuple[int, int], seed: int | None) -> None:
    """Stages of unlike sizes share the embedding too: several ranks of the larger one meet one of the other."""
    for worst in POOL.run(compared, ["1f1b", "zb-h1"], [4], each, seed, seconds=240):
        assert max(worst.values()) < 1e-12, worst


def shared_devices(rank: int) -> dict[str, float]:
    """Eight stages on four devices: interleaved, and in the shape of a V."""
    model, args, kwargs, graph = built("gpt:small")
    reference = copy.deepcopy(model)
    with all_double(True):
        loss = reference(*args, **kwargs)
        loss.backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    worst = {}
    for schedule, count in (("interleaved-1f1b", 4), ("zb-v", 3), ("v-min", 4), ("breadth-first", 2)):
        plan = pipeline_plan(graph, halves(graph, 8), count, schedule, devices=4)
        parallel = parallelize(copy.deepcopy(model), plan, args, kwargs, graph=graph)
        found = parallel(*args, **kwargs)
        found.backward()
        apart = (found - loss).abs().item()
        for name, parameter in parallel.named_parameters():
            apart = max(apart, (whole(parameter.grad) - gradients[name]).abs().max().item())
        worst[schedule] = apart
    return worst


def test_several_stages_on_a_device() -> None:
    for worst in POOL.run(shared_devices, seconds=240):
        assert max(worst.values()) < 1e-12, worst


def loops(rank: int) -> None:
    """What training loops do: scaled losses, no_sync, clipping, an optimizer whose shared weights stay alike, no loss."""
    model, args, graph = example(8)
    plan = pipeline_plan(graph, four_stages(graph), 4, "1f1b")
    reference, parallel = copy.deepcopy(model), parallelize(copy.deepcopy(model), plan, args, graph=graph)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (parallel, reference))
    for _ in range(2):
        mine.zero_grad(), theirs.zero_grad()
        (3 * reference(*args)["loss"]).backward()
        reference(*args)["loss"].backward()
        with parallel.no_sync():
            (3 * parallel(*args)["loss"]).backward()
        found = parallel(*args)
        assert all(p.grad is None for p in parallel.parameters())  # zero_grad() may stand between call and backward
        found["loss"].backward()
        norms = [clip_gradients(m, 0.5) for m in (parallel, reference)]
        torch.testing.assert_close(*norms, rtol=1e-9, atol=0)
        mine.step(), theirs.step()
    weights = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), weights[name].detach(), rtol=1e-9, atol=1e-12)
    again = parallel(*args)
    with pytest.raises(RunError, match="A gradient arrives at output"):
        (again["loss"] + again["logits"].sum()).backward()


def test_training_loops_drive_it_like_any_module() -> None:
    POOL.run(loops, seconds=240)


class Staged(torch.nn.Module):
    """One stage without anything trained before others that are, one without any parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 6).requires_grad_(False), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        wide = hidden.exp() + hidden
        return functional.cross_entropy(self.last(wide), y)


def odd_stages(rank: int) -> None:
    """A stage with nothing trained, one without parameters, forwards of the last stage out of order, under the compiler."""
    torch.manual_seed(0)
    model = Staged().double()
    args = (torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,)))
    graph = capture(model, args)
    names = [op.name for op in graph.ops]
    cuts = [names[:1], names[1:2], names[2:4], names[4:]]
    order = Schedule.parse(
        "0F0 0F1 0F2 0B0 0B1 0B2 | 1F0 1F1 1F2 1B0 1B1 1B2 | 2F0 2F1 2F2 2B0 2B1 2B2 | 3F2 3F0 3F1 3I1 3W1 3I0 3I2 3W2 3W0"
    )
    reference = copy.deepcopy(model)
    expected = reference(*args)
    expected.backward()
    parallel = parallelize(model, pipeline_plan(graph, cuts, 3, order), args, graph=graph)
    assert len(list(parallel.parameters())) == (2 if rank in (0, 3) else 0)
    found = torch.compile(parallel)(*args)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for name, parameter in parallel.named_parameters():
        wanted = reference.get_parameter(name).grad
        assert (parameter.grad is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(whole(parameter.grad), wanted, rtol=1e-9, atol=1e-12)


def test_odd_stages_and_orders() -> None:
    POOL.run(odd_stages, seconds=120)


class Plain(torch.nn.Module):
    """Gives no loss: that is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def outside(rank: int) -> None:
    torch.manual_seed(rank)
    with pytest.raises(RunError, match="do not agree on the weights"):
        model, x = Plain().double(), torch.zeros(6, 6, dtype=torch.float64)
        graph = capture(model, (x,))
        parallelize(model, pipeline_plan(graph, halves(graph, 4), 3, "1f1b"), (x,), graph=graph)
    torch.manual_seed(0)
    model, x = Plain().double(), torch.randn(6, 6, dtype=torch.float64)
    graph = capture(model, (x,))
    reference = copy.deepcopy(model)
    (reference(x) ** 3).mean().backward()
    plan = pipeline_plan(graph, halves(graph, 4), 3, "1f1b")
    plan = replace(plan, proof=replace(plan.proof, seconds=float(rank)))  # planned by every rank for itself
    parallel = parallelize(model, plan, (x,), graph=graph)
    given, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()  # as a module before it would want them
    (parallel(given) ** 3).mean().backward()
    (copy.deepcopy(reference)(wanted) ** 3).mean().backward()
    torch.testing.assert_close(given.grad, wanted.grad, rtol=1e-9, atol=1e-12)
    parallel.zero_grad()
    (parallel(x) ** 3).mean().backward()
    for name, parameter in parallel.named_parameters():
        expected = reference.get_parameter(name).grad
        torch.testing.assert_close(whole(parameter.grad), expected, rtol=1e-9, atol=1e-12)


def test_a_loss_may_be_computed_outside() -> None:
    POOL.run(outside, seconds=120)


class Leaves(torch.nn.Module):
    """Reads only some of what it is given, takes a number, hands out an input and one result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, unread: torch.Tensor, factor: float = 2.0) -> tuple[Any, ...]:
        y = self.used(x).tanh() * factor
        return y, x, y, 3


def accumulated(rank: int) -> None:
    torch.manual_seed(0)
    model, x = Leaves().double(), torch.randn(8, 6, dtype=torch.float64)
    args = (x, torch.zeros(8, 2), 2.0)
    graph, reference = captured(model, args), copy.deepcopy(model)
    plan = pipeline_plan(graph, [[op.name for op in graph.ops]], 2, "1f1b", 4, 1)
    parallel = parallelize(model, plan, args, graph=graph)
    wanted, found = reference(*args), parallel(*args)
    assert found[3] == 3
    for mine, theirs in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    (wanted[0] ** 2).sum().backward()
    (found[0] ** 2).sum().backward()
    for name, parameter in parallel.named_parameters():
        expected = reference.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(whole(parameter.grad), expected, rtol=1e-9, atol=1e-12)


def test_one_stage_keeps_what_nobody_reads() -> None:
    POOL.run(accumulated, seconds=120)


class Squared(Plain):
    """Gives its loss itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def overflows(rank: int) -> None:
    """The gradient of the first layer alone overflows under a large scale: all stages skip the step, and lower the scale."""
    for kind in (Plain, Squared):
        torch.manual_seed(0)
        model, x = kind(), 1e30 * torch.randn(6, 6)
        with torch.no_grad():
            model.layers[0].weight *= 1e-30
        reference, graph = copy.deepcopy(model), capture(model, (x,))
        names = [op.name for op in graph.ops]
        cuts = [names[:1], names[1:2], names[2:3], names[3:]]  # a layer each, the loss with the last
        parallel = parallelize(model, pipeline_plan(graph, cuts, 3, "1f1b"), (x,), graph=graph)
        scales: list[list[float]] = []
        for module in (reference, parallel):
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-70)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-10)
            scales.append([])
            for _ in range(4):
                optimizer.zero_grad()
                scaler.scale(module(x).square().mean() if kind is Plain else module(x)).backward()
                scaler.step(optimizer)
                scaler.update()
                scales[-1].append(scaler.get_scale())
        assert scales[0][0] == 2.0**30 and scales[0][-1] > 1, "overflows at first, and not for ever"
        assert scales[1] == scales[0], (kind, rank, scales)


def test_an_overflow_in_one_stage_is_one_of_all() -> None:
    POOL.run(overflows, seconds=120)


class Scaled(torch.nn.Module):
    """Its results are in proportion to the mean of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x)) * x.mean()).mean()


def through_the_whole_batch(rank: int) -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(6, 4)
    graph = captured(model, (x,))
    ours = parallelize(copy.deepcopy(model), pipeline_plan(graph, halves(graph, 4), 3, "1f1b"), graph=graph)
    torch.testing.assert_close(ours(x), model(x))
    with pytest.raises(RunError, match=r"The gradient of x goes through what is computed of the whole batch"):
        ours(x.clone().requires_grad_())


def test_a_gradient_through_the_whole_batch_is_refused() -> None:
    POOL.run(through_the_whole_batch)


def verified(rank: int, text: str) -> bool | None:
    plan = from_json(text)
    found = verify_rank(functools.partial(built_model, "gpt:small"), {True: plan}, 2, False, True)
    return None if found is None else found.agrees and found.cuts


def built_model(reference: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    found = resolve(reference, device="cpu")
    return found.model, found.args, found.kwargs


def test_verify_looks_at_the_numbers_of_every_stage() -> None:
    graph = built("gpt:small")[3]
    plan = pipeline_plan(graph, halves(graph, 2), 3, "zb-h1", each=2)
    assert POOL.run(verified, to_json(plan), seconds=120)[0] is True


def per_piece(rank: int) -> None:
    """A ResNet whose micro-batches have batch statistics of their own, against one process that takes them in turn."""
    torch.manual_seed(0)
    found = resolve("wresnet50:small,channels=2,image=32", batch=7, device="cpu")
    model, (images, labels) = found.model.double(), found.args
    images = images.double()
    graph = captured(model, (images, labels))
    plan = pipeline_plan(graph, halves(graph, 4), 3, "1f1b", batch_norm="per-piece")
    plan = from_json(to_json(plan))
    reference = copy.deepcopy(model)
    parallel = parallelize(copy.deepcopy(model), plan, (images, labels), graph=graph)
    losses = []
    for x, y in zip(images.split([3, 2, 2]), labels.split([3, 2, 2]), strict=True):
        losses.append(reference(x, y) * len(x) / 7)
        losses[-1].backward()
    loss = parallel(images, labels)
    loss.backward()
    torch.testing.assert_close(loss, sum(losses), rtol=1e-12, atol=0)
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), reference.get_parameter(name).grad, rtol=1e-8, atol=1e-11)
    buffers = dict(reference.named_buffers())
    mine = dict(parallel.named_buffers())
    assert mine
    for name, buffer in mine.items():
        torch.testing.assert_close(whole(buffer), buffers[name], rtol=1e-10, atol=1e-12)


def test_batch_norm_per_piece_is_one_process_taking_the_pieces_in_turn() -> None:
    POOL.run(per_piece, seconds=240)


def delayed(rank: int) -> None:
    """Rank 0 ends its passes when the ranks of the last stage have summed their gradients, which must not wait for it."""
    model, args, graph = example(8)
    plan = pipeline_plan(graph, halves(graph, 2), 2, "1f1b", 2, None)
    parallel = parallelize(model, plan, args, graph=graph)
    store = default_store()
    if rank == 0:
        mail = parallel._planned._p2p["whole"]
        finish = mail.finish

        def late() -> None:
            finish()
            store.wait([f"gradients summed by {other}" for other in (2, 3)], timedelta(seconds=60))

        mail.finish = late  # type: ignore[method-assign]
    elif rank > 1:
        for part in parallel._planned.parts.values():
            home = part.executor.reduce

            def noted(kept: Any, home: Any = home) -> None:
                home(kept)
                store.set(f"gradients summed by {rank}", "")

            part.executor.reduce = noted  # type: ignore[method-assign]
    parallel(*args)["loss"].backward()


def test_the_last_stage_sums_its_gradients_while_the_first_is_still_going_back() -> None:
    POOL.run(delayed, seconds=120)


def lower_precision(rank: int, folder: str) -> None:
    """bfloat16 to compute with and to send, float32 masters; a model on meta of which a rank makes its own stages only."""
    torch.manual_seed(0)
    args = (torch.randint(31, (8, 5)), torch.randint(31, (8, 5)))
    masters = Tied()
    low = copy.deepcopy(masters).bfloat16()
    graph = capture(low, args)
    plan = pipeline_plan(graph, four_stages(graph), 4, "zb-h1")
    low(*args)["loss"].backward()
    parallel = parallelize(copy.deepcopy(masters), plan, args, graph=graph, compute_dtype=torch.bfloat16)
    assert {border.dtype for borders in parallel.pipeline.boundaries.values() for border in borders} == {"bfloat16"}
    loss = parallel(*args)["loss"]
    loss.backward()
    torch.testing.assert_close(loss.float(), low(*args)["loss"].float(), rtol=2e-2, atol=0)
    for name, parameter in parallel.named_parameters():
        wanted = low.get_parameter(name).grad
        assert parameter.dtype == torch.float32 and (parameter.grad is None) == (wanted is None)
        if wanted is not None:
            mine = whole(parameter.grad).float()
            assert torch.nn.functional.cosine_similarity(mine.flatten(), wanted.float().flatten(), 0) > 0.999, name
    save_checkpoint(folder, 1, parallel)
    with parameters_on_meta():
        bare = Tied()
    again = parallelize(bare, plan, args, graph=graph, weights=f"{folder}/step-1", compute_dtype=torch.bfloat16)
    assert all(parameter.is_meta for parameter in bare.parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(whole(parameter), masters.get_parameter(name))
    assert len(list(again.parameters())) < len(list(masters.parameters()))


def test_masters_in_float32_and_models_on_meta(tmp_path: Path) -> None:
    POOL.run(lower_precision, str(tmp_path), seconds=120)
