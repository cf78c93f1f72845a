"""Deliberate faults: each is planted into the running ranks, and ``verify`` with its defaults must notice every one of them.

A proof is worth what it can refute. The faults are those that once passed (a rank that never updates its buffers, halved
logits) and those that a change of the runtime is most likely to bring in: a share not sent, a border off by one, a statistic
that is not exchanged. Each is a small patch of one function, applied in the ranks only, and paired with the smallest
model that can show it. ``python -m bench mutations`` calls ``shardwright.verify`` for every row, in fresh processes, and
for every model without any fault.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.lowering import collectives, randomness
from shardwright.operators.kernels import convolutions, losses, normalisations
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import KERNELS
from shardwright.program import binding
from shardwright.runtime import buckets, bundles, execution, executor, summing


class Words(nn.Module):
    """A table of 11 rows that is also the head, a layer norm, attention by hand and by one operator, labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.mix = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.table(tokens))
        x = x + ((x @ x.transpose(1, 2)).softmax(-1) @ self.mix(x))
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        logits = x @ self.table.weight.T
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Pictures(nn.Module):
    """Two convolutions with halos around a batch norm whose statistics are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4, momentum=0.3),
            nn.Conv2d(4, 2, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))).square().mean()


class Perceptron(nn.Module):
    """Three layers, the last two of them one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(torch.tanh(self.second(x))))).square().mean()


class Forgetting(nn.Module):
    """A layer before and after a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x), 0.4)).square().mean()


def words() -> Any:
    return Words(), (torch.randint(11, (8, 5)), torch.randint(11, (8, 5))), {}


def pictures() -> Any:
    return Pictures(), (torch.randn(8, 3, 9, 8),), {}


def perceptron() -> Any:
    return Perceptron(), (torch.randn(8, 5),), {}


def forgetting() -> Any:
    return Forgetting(), (torch.randn(16, 8),), {}


Patch = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Mutation:
    """A fault, the model that shows it, how it is planted, and on how few processes it can be seen."""

    name: str
    model: Callable[[], Any]
    plant: Patch
    processes: int = 2


MUTATIONS: dict[str, Mutation] = {}


def mutation(name: str, model: Callable[[], Any], processes: int = 2) -> Callable[[Patch], Patch]:
    def register(plant: Patch) -> Patch:
        MUTATIONS[name] = Mutation(name, model, plant, processes)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The fault is there inside (no fault for an empty name)."""
    with ExitStack() as stack:
        if name:
            MUTATIONS[name].plant(stack)
        yield


def around(stack: ExitStack, owner: Any, attribute: str, change: Callable[..., Any]) -> None:
    """Replace a function by ``change(original, *args)``; it must exist."""
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    stack.enter_context(mock.patch.object(owner, attribute, changed))


def in_kernel(stack: ExitStack, target: str, change: Callable[[Callable[[Call], Piece | None], Call], Any]) -> None:
    original = KERNELS[target]
    stack.enter_context(mock.patch.dict(KERNELS, {target: functools.partial(change, original)}))


def last_rank() -> bool:
    return dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1


@mutation("gradient share not sent", perceptron)
def _(stack: ExitStack) -> None:
    def silent(original: Any, self: Any, tensor: str, gradient: Tensor) -> Any:
        return original(self, tensor, gradient * 0 if last_rank() else gradient)

    around(stack, buckets.Flat, "fill", silent)


@mutation("wrong scatter piece", perceptron)
def _(stack: ExitStack) -> None:
    def rolled(original: Any, x: Tensor, dim: int, extent: int, line: Any) -> Tensor:
        stack = original(x, dim, extent, line)
        return stack.roll(stack.shape[0] // line.size, 0)

    for owner in (collectives, bundles):
        around(stack, owner, "even_stack", rolled)


@mutation("stale bucket", perceptron)
def _(stack: ExitStack) -> None:
    def kept(original: Any, self: Any, tensor: str, gradient: Tensor) -> None:
        before = self._parts[tensor].clone() if tensor in self._parts else None
        original(self, tensor, gradient)
        if before is not None:
            self._parts[tensor].copy_(before)

    around(stack, buckets.Flat, "fill", kept)


@mutation("sum on rank 0 only", perceptron)
def _(stack: ExitStack) -> None:
    def own(original: Any, self: Any) -> None:
        mine = self._pieces[0].clone()
        original(self)
        if dist.get_rank():
            self._pieces[0].copy_(mine)

    around(stack, summing.Summing, "finish", own)


@mutation("extra 1/p", perceptron)
def _(stack: ExitStack) -> None:
    def averaged(original: Any, self: Any, *args: Any, **options: Any) -> Any:
        original(self, *args, **options)
        self._pieces[0].div_(dist.get_world_size())

    around(stack, summing.Summing, "finish", averaged)


@mutation("all-reduce dropped", perceptron)
def _(stack: ExitStack) -> None:
    around(stack, collectives, "all_reduce", lambda original, x, reduce, line: x.clone())


@mutation("mask kept on all ranks", perceptron)
def _(stack: ExitStack) -> None:
    def unmasked(original: Any, x: Tensor, step: Any) -> Tensor:
        return x.clone() if step.kind == "mask" else original(x, step)

    around(stack, collectives, "_run_step", unmasked)


@mutation("tied share lost", words)
def _(stack: ExitStack) -> None:
    def forgetful(original: Any, self: Any, instruction: Any) -> Any:
        if instruction.name not in self.flow.graph.parameter_of:
            return original(self, instruction)

        def last_only(run: Any) -> None:
            run.slots[instruction.writes[0]] = run.slots[instruction.reads[1]]

        return last_only

    around(stack, executor.Executor, "_accumulate", forgetful)


@mutation("swapped gather", perceptron)
def _(stack: ExitStack) -> None:
    def swapped(original: Any, stacked: Tensor, dim: int, extent: int, line: Any) -> Tensor:
        parts = stacked.chunk(line.size)
        return original(torch.cat([parts[1], parts[0], *parts[2:]]), dim, extent, line)

    for owner in (collectives, executor):
        around(stack, owner, "in_place", swapped)


@mutation("embedding boundary off by one", words)
def _(stack: ExitStack) -> None:
    def shifted(original: Any, call: Call) -> Any:
        made = original(call)
        span = call.input_spans(0).get(0)
        if made is None or span is None:
            return made

        def kernel(weight: Tensor, indices: Tensor, exchange: Any = None) -> Tensor:
            found = made.kernel(weight, indices, exchange=exchange)
            return found * (indices != span.stop - 1).unsqueeze(-1)

        return Piece(kernel=kernel)

    in_kernel(stack, "aten.embedding.default", shifted)


@mutation("padding of ones", pictures)
def _(stack: ExitStack) -> None:
    around(stack, convolutions, "padded", lambda original, x, missing, fill: original(x, missing, 1.0))


@mutation("shards padded with ones in sums", perceptron)
def _(stack: ExitStack) -> None:
    def ones(original: Any, x: Tensor, dim: int, before: int, after: int) -> Tensor:
        made = original(x, dim, before, after)
        made.narrow(dim, 0, before).fill_(1.0)
        made.narrow(dim, made.shape[dim] - after, after).fill_(1.0)
        return made

    around(stack, collectives, "_surround", ones)


@mutation("batch-norm momentum", pictures)
def _(stack: ExitStack) -> None:
    def other(original: Any, call: Call) -> Any:
        values = call.op.args
        momentum = call.argument("momentum")
        args = tuple(1 - momentum if value == momentum else value for value in values)
        return original(replace(call, op=replace(call.op, args=args)))

    in_kernel(stack, "aten._native_batch_norm_legit_functional.default", other)


@mutation("biased variance", pictures)
def _(stack: ExitStack) -> None:
    def biased(original: Any, call: Call) -> Any:
        made = original(call)
        x = call.tensors[call.op.inputs[0]].shape
        count = x[0] * x[2] * x[3]
        if made is None or made.kernel is None:
            return made

        def kernel(*tensors: Tensor, exchange: Any = None) -> Any:
            *results, variance = made.kernel(*tensors, exchange=exchange)
            momentum = call.argument("momentum")
            old = tensors[-1]
            return (*results, old * (1 - momentum) + (variance - old * (1 - momentum)) * (count - 1) / count)

        return Piece(kernel=kernel)

    in_kernel(stack, "aten._native_batch_norm_legit_functional.default", biased)


@mutation("local label count", words)
def _(stack: ExitStack) -> None:
    around(stack, losses, "everywhere", lambda original, exchange, x, reduce, loops: x)


@mutation("doubled loss divisor", words)
def _(stack: ExitStack) -> None:
    around(stack, losses, "everywhere", lambda original, *arguments: original(*arguments) * 2)


@mutation("halo off by one", pictures)
def _(stack: ExitStack) -> None:
    around(stack, collectives, "halo", lambda original, x, step: original(x, step).roll(1, step.dim))


@mutation("halo gradient lost", pictures)
def _(stack: ExitStack) -> None:
    def own_only(original: Any, x: Tensor, step: Any) -> Tensor:
        want, mine = step.wants[step.line.position], step.holds[step.line.position]
        kept = mine.overlap(want)
        inside = torch.zeros_like(x)
        inside.narrow(step.dim, kept.start - want.start, kept.length).fill_(1.0)
        return original(x * inside, step)

    around(stack, collectives, "halo_reduce", own_only)


@mutation("layer-norm count", words)
def _(stack: ExitStack) -> None:
    def local(original: Any, x: Tensor, dims: Any, count: int, loops: Any, exchange: Any) -> Any:
        return original(x, dims, count // 2, loops, exchange)

    around(stack, normalisations, "moments", local)


@mutation("causal offset", words)
def _(stack: ExitStack) -> None:
    def from_zero(original: Any, call: Call) -> Any:
        rank = len(call.output.shape)
        span = call.output_spans().get(rank - 2)
        if span is None:
            return original(call)
        return call.kernel(
            lambda exchange, **a: F.scaled_dot_product_attention(
                a["query"],
                a["key"],
                a["value"],
                torch.arange(span.size, device=a["key"].device).unsqueeze(1)
                >= torch.arange(a["key"].shape[-2], device=a["key"].device),
                scale=a["scale"],
            )
        )

    in_kernel(stack, "aten.scaled_dot_product_attention.default", from_zero)


@mutation("softmax exchange", words)
def _(stack: ExitStack) -> None:
    def alone(original: Any, call: Call) -> Any:
        made = original(call)
        if made is None or made.kernel is None:
            return made
        return Piece(kernel=lambda *tensors, exchange=None: made.kernel(*tensors, exchange=lambda x, *_: x))

    in_kernel(stack, "aten.softmax.int", alone)


@mutation("a rank that never updates buffers", pictures)
def _(stack: ExitStack) -> None:
    def never(original: Any, self: Any, tensor: str, value: Tensor) -> None:
        if not last_rank():
            original(self, tensor, value)

    around(stack, execution.Execution, "_replace", never)


@mutation("halved logits", words)
def _(stack: ExitStack) -> None:
    def halved(original: Any, self: Any, value: Tensor, result: Any) -> Any:
        return original(self, value * 0.5 if value.numel() > 1 else value, result)

    around(stack, execution.Execution, "_handed_out", halved)


@mutation("a rank's last update doubled", perceptron)
def _(stack: ExitStack) -> None:
    steps: dict[int, int] = {}

    def doubled(original: Any, self: Any, *args: Any, **options: Any) -> Any:
        steps[id(self)] = steps.get(id(self), 0) + 1
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in held]
        made = original(self, *args, **options)
        if last_rank() and steps[id(self)] == 3:
            with torch.no_grad():
                for parameter, old in zip(held, before, strict=True):
                    parameter.add_(parameter - old)
        return made

    around(stack, torch.optim.AdamW, "step", doubled)


@mutation("one dropout mask on all shards", forgetting)
def _(stack: ExitStack) -> None:
    around(stack, randomness, "piece_seed", lambda original, place: original(0))


@mutation("another dropout mask on every copy", forgetting, processes=4)
def _(stack: ExitStack) -> None:
    around(stack, randomness, "piece_seed", lambda original, place: original(dist.get_rank()))


@mutation("windows cut one place further", pictures)
def _(stack: ExitStack) -> None:
    def further(original: Any, *args: Any) -> Any:
        step = original(*args)
        last = len(step.wants) - 1
        moved = [w._replace(start=w.start - 1, stop=w.stop - 1) if i == last else w for i, w in enumerate(step.wants)]
        return step._replace(wants=tuple(moved))

    around(stack, binding, "_windowed", further)


def faulty(name: str, model: Callable[[], Any]) -> Any:
    """The model of a row; in a rank, the fault is planted for good before it is built."""
    if dist.is_initialized() and name:
        MUTATIONS[name].plant(ExitStack())
    return model()


def main() -> None:
    import shardwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant (all, and none, if not given)")
    chosen = parser.parse_args()
    sound = [("", model, 2) for model in (words, pictures, perceptron, forgetting)]
    rows = [(m.name, m.model, m.processes) for m in MUTATIONS.values() if not chosen.names or m.name in chosen.names]
    print("| fault | model | processes | noticed by | in |\n|---|---|---|---|---|")
    missed = 0
    for name, model, processes in ([] if chosen.names else sound) + rows:
        try:
            answer = shardwright.verify(functools.partial(faulty, name, model), cluster=f"local:{processes}")
            wrong = [(run.name, item) for run in answer.runs for item in run.comparisons if not item.agrees]
            by = ", ".join(dict.fromkeys(strategy for strategy, _ in wrong)) or "nothing"
            what = ", ".join(dict.fromkeys(item.what for _, item in wrong))
        except shardwright.ShardwrightError as error:
            wrong, by, what = [error], "an error", error.message[:80]
        missed += bool(wrong) != bool(name)
        print(f"| {name or '(none)'} | {model.__name__} | {processes} | {by} | {what} |", flush=True)
    sys.exit(f"{missed} verdicts are wrong" if missed else 0)


if __name__ == "__main__":
    main()
