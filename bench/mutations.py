"""Deliberate faults: each is planted into the running ranks, and ``verify`` with its defaults must notice every one of them.

A proof is worth what it can refute. The faults are those that once passed (a rank that never updates its buffers, halved
logits) and those that a change of the runtime is most likely to bring in: a share not sent, a border off by one, a statistic
that is not exchanged. Each is a small patch of one function, applied in the ranks only, and paired with the smallest
model that can show it. ``python -m bench mutations`` calls ``shardwright.verify`` for every row, in fresh processes, and
for every correct model (:mod:`sound_models`) without any.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering import collectives, randomness
from shardwright.program import binding
from shardwright.runtime import (
    boundary,
    buckets,
    bundles,
    communication,
    gradient_reduction,
    stage_program,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))

import faulty_kernels  # noqa: F401  # registers its faults
import faulty_steps  # noqa: F401  # registers its faults
from planting import MUTATIONS, around, deep, forgetting, last_rank, mutation, perceptron, pictures, planted, words

__all__ = ["MUTATIONS", "deep", "forgetting", "perceptron", "pictures", "planted", "words"]


@mutation("gradient share not sent", perceptron)
def _(stack: ExitStack) -> None:
    def silent(original: Any, self: Any, tensor: str, gradient: Tensor) -> Any:
        return original(self, tensor, gradient * 0 if last_rank() else gradient)

    around(stack, buckets.FlatBucket, "fill", silent)


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

    around(stack, buckets.FlatBucket, "fill", kept)


@mutation("sum on rank 0 only", perceptron)
def _(stack: ExitStack) -> None:
    def own(original: Any, self: Any) -> None:
        mine = self._pieces[0].clone()
        original(self)
        if dist.get_rank():
            self._pieces[0].copy_(mine)

    around(stack, buckets.BucketReduction, "finish", own)


@mutation("extra 1/p", perceptron)
def _(stack: ExitStack) -> None:
    def averaged(original: Any, self: Any, *args: Any, **options: Any) -> Any:
        original(self, *args, **options)
        self._pieces[0].div_(dist.get_world_size())

    around(stack, buckets.BucketReduction, "finish", averaged)


@mutation("all-reduce dropped", perceptron)
def _(stack: ExitStack) -> None:
    around(stack, collectives, "all_reduce", lambda original, x, *rest: x.clone())


@mutation("mask kept on all ranks", perceptron)
def _(stack: ExitStack) -> None:
    def unmasked(original: Any, x: Tensor, step: Any, *rest: Any) -> Tensor:
        return x.clone() if step.kind == "mask" else original(x, step, *rest)

    around(stack, collectives, "_run_step", unmasked)


@mutation("tied share lost", words)
def _(stack: ExitStack) -> None:
    def forgetful(original: Any, self: Any, instruction: Any) -> Any:
        if instruction.name not in self.flow.graph.parameter_of:
            return original(self, instruction)

        def last_only(run: Any) -> None:
            run.slots[instruction.writes[0]] = run.slots[instruction.reads[1]]

        return last_only

    around(stack, gradient_reduction.GradientReduction, "_accumulate", forgetful)


@mutation("swapped gather", perceptron)
def _(stack: ExitStack) -> None:
    def swapped(original: Any, stacked: Tensor, dim: int, extent: int, line: Any) -> Tensor:
        parts = stacked.chunk(line.size)
        return original(torch.cat([parts[1], parts[0], *parts[2:]]), dim, extent, line)

    for owner in (collectives, communication):
        around(stack, owner, "in_place", swapped)


@mutation("shards padded with ones in sums", perceptron)
def _(stack: ExitStack) -> None:
    def ones(original: Any, x: Tensor, dim: int, before: int, after: int) -> Tensor:
        made = original(x, dim, before, after)
        made.narrow(dim, 0, before).fill_(1.0)
        made.narrow(dim, made.shape[dim] - after, after).fill_(1.0)
        return made

    around(stack, collectives, "_surround", ones)


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


@mutation("a rank that never updates buffers", pictures)
def _(stack: ExitStack) -> None:
    def never(original: Any, self: Any, values: Any) -> None:
        if not last_rank():
            original(self, values)

    around(stack, stage_program.StageProgram, "store", never)


@mutation("halved logits", words)
def _(stack: ExitStack) -> None:
    def halved(original: Any, self: Any, name: str, value: Tensor) -> Any:
        return original(self, name, value * 0.5 if value.numel() > 1 else value)

    around(stack, boundary.Boundary, "handed_out", halved)


@mutation("a rank's second update doubled", perceptron)
def _(stack: ExitStack) -> None:
    steps: dict[int, int] = {}

    def doubled(original: Any, self: Any, *args: Any, **options: Any) -> Any:
        steps[id(self)] = steps.get(id(self), 0) + 1
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in held]
        made = original(self, *args, **options)
        if last_rank() and steps[id(self)] == 2:
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


def verdict(name: str, model: Callable[[], Any], processes: int) -> tuple[bool, str, str]:
    """Whether anything is noticed, by what, and in what kinds of numbers."""
    import shardwright

    try:
        answer = shardwright.verify(functools.partial(faulty, name, model), cluster=f"local:{processes}")
    except shardwright.ShardwrightError as error:
        return True, "an error", error.message[:80]
    wrong = [(run.name, item) for run in answer.runs for item in run.comparisons if not item.agrees]
    by = ", ".join(dict.fromkeys(strategy for strategy, _ in wrong)) or "nothing"
    what = ", ".join(dict.fromkeys(item.what for _, item in wrong))
    return bool(wrong), by, what or f"{len(answer.runs)} runs, {'; '.join(answer.compared)}"


def main() -> None:
    from sound_models import SOUND

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant, or models (all of both, if not given)")
    parser.add_argument("--only", choices=("faults", "sound"), help="one half of the table")
    chosen = parser.parse_args()
    rows = [("", model, name, 2) for name, model in SOUND.items()] if chosen.only != "faults" else []
    if chosen.only != "sound":
        rows += [(m.name, m.model, m.model.__name__, m.processes) for m in MUTATIONS.values()]
    print("| fault | model | processes | noticed by | in | s |\n|---|---|---|---|---|---|")
    missed = 0
    for name, model, title, processes in rows:
        if not chosen.names or name in chosen.names or title in chosen.names:
            began = time.monotonic()
            wrong, by, what = verdict(name, model, processes)
            missed += wrong != bool(name)
            seconds = time.monotonic() - began
            print(f"| {name or '(none)'} | {title} | {processes} | {by} | {what} | {seconds:.0f} |", flush=True)
    sys.exit(f"{missed} verdicts are wrong" if missed else 0)


if __name__ == "__main__":
    main()
