"""Gradients over the border of a parallelized module: inputs and outputs whole, in parts and as DTensors."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize

SEARCHES = ("auto", "megatron", "data-parallel", "fsdp")
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Block(torch.nn.Module):
    """Reads its input on two ways, one of them past a detach, and gives features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(F.gelu(self.up(torch.tanh(x))))
        return self.down(hidden) + x * x.detach() + x.amax(-1, keepdim=True)


class Classifier(torch.nn.Module):
    """A loss of its own beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.block(x))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


@functools.lru_cache
def example() -> tuple:
    torch.manual_seed(0)
    front, block, classifier, back = torch.nn.Linear(12, 16), Block(), Classifier(), torch.nn.Linear(16, 10)
    x, y = torch.randn(8, 12, dtype=torch.float64), torch.randint(10, (8,))
    return front.double(), block.double(), classifier.double(), back.double(), x, y


@functools.lru_cache
def planned(search: str, devices: int):
    _, block, classifier, _, _, y = example()
    hidden = torch.zeros(8, 16, dtype=torch.float64)
    options = Options(search=search, baselines=(), fewer_devices=False)
    cluster = parse_cluster(f"local:{devices}")
    return tuple(
        plan_graph(capture(model, args), cluster, options)
        for model, args in ((block, (hidden,)), (classifier, (hidden, y)))
    )


@functools.lru_cache
def mesh_for(axes: tuple[tuple[str, int], ...]):
    """The plan's mesh over all workers."""
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def split(model, plan, **options):
    return parallelize(model, plan, mesh=mesh_for(plan.stages[0].strategy.axes), keep=True, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_gradients(found, expected) -> None:
    theirs = dict(found.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(whole(theirs[name].grad), parameter.grad, **CLOSE)


def loops(rank: int, plans) -> None:
    """A module before, a module after, a loss outside, two parallelized modules in a row: gradients everywhere."""
    modules, (x, y) = example()[:4], example()[4:]

    def step(front, block, classifier, back):
        given = x.clone().requires_grad_()
        features = block(front(given))
        outside = F.cross_entropy(back(features), y)
        inside = classifier(features * 1.5, y)
        loss = outside + inside["loss"] + inside["logits"].square().mean()
        loss.backward()
        return given.grad, loss.detach()

    ours = [copy.deepcopy(module) for module in modules]
    ours[1], ours[2] = split(ours[1], plans[0]), split(ours[2], plans[1])
    theirs = [copy.deepcopy(module) for module in modules]
    for found, expected in zip(step(*ours), step(*theirs), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    for found, expected in zip(ours, theirs, strict=True):
        same_gradients(found, expected)


def kinds_of_tensors(rank: int, plans) -> None:
    """The gradient of an input lies as the input does, and that of a result comes as the result was handed out."""
    _, block, _, _, _, _ = example()
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    reference, true = copy.deepcopy(block), x.clone().requires_grad_()
    (reference(true) * weights).sum().backward()
    plan = plans[0]
    mesh = mesh_for(plan.stages[0].strategy.axes)
    for inputs in ("whole", "local"):
        for outputs in ("whole", "local", "dtensor"):
            parallel = split(block, plan, inputs=inputs, outputs=outputs)
            flow, resting = parallel.program.flow, parallel.program.strategy.resting["x"]
            laid_out = distribute_tensor(x, mesh, resting)
            layout = flow.values[flow.results[0]].needs
            given = {
                "whole": x.clone(),
                "local": laid_out.to_local().clone(),
                "dtensor": laid_out.detach(),
            }
            for kind in (inputs, "dtensor"):
                parallel.zero_grad()
                leaf = given[kind].clone().requires_grad_()
                result = parallel(leaf)
                mine = distribute_tensor(weights, mesh, layout)
                product = result * {"whole": weights, "local": mine.to_local(), "dtensor": mine}[outputs]
                product.sum().backward()
                assert leaf.grad.shape == leaf.shape
                expected = true.grad if kind != "local" else distribute_tensor(true.grad, mesh, resting).to_local()
                torch.testing.assert_close(whole(leaf.grad), expected, **CLOSE)
                same_gradients(parallel, reference)


def some_steps(rank: int, plans) -> None:
    """With and without input gradients in turn, recomputed evaluation between, held back over passes of both kinds."""
    _, _, classifier, _, _, y = example()
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parallel, reference = split(classifier, plans[1]), copy.deepcopy(classifier)
    for asks in (False, True, True, False):
        for module in (parallel, reference):
            module.zero_grad()
            given = x.clone().requires_grad_(asks)
            with torch.no_grad():
                module(given, y)
            module(given, y)["loss"].backward()
            module.given = given
        if asks:
            torch.testing.assert_close(parallel.given.grad, reference.given.grad, **CLOSE)
        same_gradients(parallel, reference)
    parallel.zero_grad(), reference.zero_grad()
    given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with parallel.no_sync():
        parallel(given, y)["loss"].backward()
        parallel(x, y)["loss"].backward()
    parallel(given, y)["loss"].backward()
    for leaf in (other, x, other):
        reference(leaf, y)["loss"].backward()
    torch.testing.assert_close(given.grad, other.grad, **CLOSE)
    same_gradients(parallel, reference)


def as_plain_tensors(rank: int, plans) -> None:
    """What is cut between the ranks behaves as the whole tensor that it is, and is put together only when it is used."""
    _, _, classifier, _, _, y = example()
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parallel, expected = split(classifier, plans[1]), classifier(x, y)["logits"].detach()
    logits = parallel(x, y)["logits"]
    assert logits.shape == expected.shape and logits._gathered is None
    assert type(logits.argmax(-1)) is torch.Tensor
    assert (logits.argmax(-1) == y).sum() == (expected.argmax(-1) == y).sum()
    torch.testing.assert_close(torch.tensor(logits.tolist(), dtype=x.dtype), expected, **CLOSE)
    torch.testing.assert_close(torch.from_numpy(logits.detach().numpy()), expected, **CLOSE)
    torch.testing.assert_close(copy.deepcopy(logits.detach()), expected, **CLOSE)
    assert "tensor(" in repr(logits)
    masked = parallel(x, y)["logits"]
    masked[:, 0] = 0.0
    masked.mul_(2.0)
    reference = copy.deepcopy(classifier)
    also = reference(x, y)["logits"]
    also[:, 0] = 0.0
    also.mul_(2.0)
    parallel.zero_grad()
    masked.square().sum().backward(), also.square().sum().backward()
    torch.testing.assert_close(parallel.head.weight.grad.full_tensor(), reference.head.weight.grad, **CLOSE)

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            ctx.save_for_backward(scores)
            return scores.square().sum()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    parallel.zero_grad(), reference.zero_grad()
    Own.apply(parallel(x, y)["logits"]).backward(), Own.apply(reference(x, y)["logits"]).backward()
    same_gradients(parallel, reference)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_module_before_and_after_on_two_processes(pair, search):
    pair.run(loops, planned(search, 2))


def test_a_module_before_and_after_on_four_processes(pool):
    pool.run(loops, planned("auto", 4))


@pytest.mark.parametrize("search", SEARCHES)
def test_gradients_lie_as_their_tensors_do(pair, search):
    pair.run(kinds_of_tensors, planned(search, 2))


@pytest.mark.parametrize("search", ["data-parallel", "fsdp"])
def test_calls_with_and_without_input_gradients(pair, search):
    pair.run(some_steps, planned(search, 2))


def test_results_are_plain_tensors(pair):
    pair.run(as_plain_tensors, planned("data-parallel", 2))
