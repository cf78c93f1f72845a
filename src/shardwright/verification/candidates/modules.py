"""Which module is the first to return something else? Outputs of a candidate's modules against those of one process.

A rank may hold all of an output, some rows, heads, features or positions of it, or a partial sum that is completed
later. What it holds is therefore looked for by its values: an output is right where every number of it is among
those that one process has, or where the sum over the ranks is. What modules return need not be equal for the run to
be right (a fused module returns other things), so this only says where a difference begins that has been seen elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright._torch_compat import flatten_tree
from shardwright.verification.batches import Batch
from shardwright.verification.candidates.observing import Dropouts, Seen
from shardwright.verification.candidates.recognising import Numbers, flat
from shardwright.verification.judging import twin_of
from shardwright.verification.prepare import all_double

CLOSE = 1e-8
"""Numbers that differ by no more than this share of the largest are one number."""


@dataclass(frozen=True)
class Output:
    """A module's output: ``held`` is "whole", "part" or "partial sum" where the ranks hold what one process does, and empty
    where they do not. ``covered``: the share of its numbers that some rank holds."""

    path: str
    held: str
    covered: float
    true: Numbers
    theirs: tuple[Numbers, ...]


def outputs(model: nn.Module, batch: Batch, seen: Sequence[Seen]) -> list[Output]:
    """The outputs of all modules that the ranks told of, in the order in which one process has them."""
    found = []
    for path, true in _alone(model, batch).items():
        holding = [rank for rank in seen if path in rank.outputs]
        if holding:
            found.append(_compared(path, true, holding))
    return found


def _alone(model: nn.Module, batch: Batch) -> dict[str, Numbers]:
    twin, (((args, kwargs, _),),) = twin_of(model, [[batch]], wide=True)
    kept: dict[str, list[Tensor]] = {}

    def told(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [
                leaf for leaf in flatten_tree(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ]
            if tensors:
                kept.setdefault(path, []).append(tensors[0].detach().clone())

        return hook

    for path, module in twin.named_modules():
        module.register_forward_hook(told(path))
    with torch.no_grad(), all_double(), Dropouts(on=False):
        twin(*args, **kwargs)
    return {path: np.concatenate([flat(tensor) for tensor in tensors]) for path, tensors in kept.items()}


def _compared(path: str, true: Numbers, holding: Sequence[Seen]) -> Output:
    theirs = [rank.outputs[path] for rank in holding]
    close = CLOSE * float(np.abs(true).max(initial=0.0)) + 1e-300
    inside = [_among(true, output, close) for output in theirs]
    covered = _covered(true, np.concatenate(theirs), close)
    if all(part.all() for part in inside):
        held = "whole" if all(len(output) == len(true) for output in theirs) else "part"
        return Output(path, held, covered, true, tuple(theirs))
    parts: dict[int, list[Numbers]] = {}
    for rank, output in zip(holding, theirs, strict=True):
        parts.setdefault(rank.rows[0], []).append(output)
    sums = [np.sum(group, axis=0) for group in parts.values() if len({len(output) for output in group}) == 1]
    summed = bool(sums) and all(_among(true, total, close).all() for total in sums) and len(sums) < len(theirs)
    return Output(path, "partial sum" if summed else "", covered, true, tuple(theirs))


def _among(true: Numbers, output: Numbers, close: float) -> Any:
    """Which numbers are, nearly, among those of one process."""
    ordered = np.sort(true)
    at = np.searchsorted(ordered, output).clip(1, max(len(ordered) - 1, 1))
    near = np.minimum(
        np.abs(ordered[(at - 1).clip(max=len(ordered) - 1)] - output),
        np.abs(ordered[at.clip(max=len(ordered) - 1)] - output),
    )
    return near <= close


def _covered(true: Numbers, theirs: Numbers, close: float) -> float:
    return float(_among(theirs, true, close).mean()) if len(true) and len(theirs) else 1.0
