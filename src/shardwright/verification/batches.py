"""What the steps of a verification are given: another batch in every pass, and two passes in one of the steps.

A runtime that keeps its first batch computes the right numbers of that batch, so no two passes in a row get the same. Other
batches are made of the example's own rows: some rows are left out and their neighbours stand in their place, in all tensors
alike. Every row was legal in the example, with its labels, its mask and its length, the order of rows stays (sequences may
have to be sorted by length), and a loss over the rows is another one. Batches of one or two rows keep them and are rolled
along their second dim. What counts up from zero (positions, offsets) stays. Where a model has looked at its data when it was
captured and another batch would be answered otherwise, every pass gets the example.

The middle step adds up the gradients of two passes, as a training loop does whose batch is too large for one, so that
an accumulation which forgets is seen. Not every run has to do all of it (:func:`shortened`): operators are traced at the
fourth pass, which takes longer than three passes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwright._torch_compat import flatten_tree, unflatten_tree
from shardwright.frontend.prune import assumptions
from shardwright.frontend.replay import replay
from shardwright.graph import Graph

_PERIOD = 3
"""One row in so many is left out of a batch."""
_FEW = 2
"""Batches of so many rows keep them all: a batch norm of two equal rows divides by nothing but its epsilon."""


class Batch(NamedTuple):
    """The arguments of one call, and the random numbers that it draws, where those are known."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    draws: Sequence[Tensor] | None = None


Passes = Literal["all", "one", "two", "last"]
Steps = Sequence[Sequence[Batch]]
"""The batches of every step: several are several passes whose gradients are added up."""


def repeated(args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int) -> Steps:
    """The example in every step, and nothing else."""
    return [[Batch(tuple(args), kwargs)] for _ in range(steps)]


def varied(
    model: torch.nn.Module,
    graph: Graph | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    steps: int,
    training: bool = True,
) -> Steps:
    """The batches of so many steps: the example first, then others; two in the middle step of a training.

    Without a ``graph`` nothing is known of what the model takes for granted about its data.
    """
    counts = [1 + (training and step == steps // 2) for step in range(steps)]
    every = [Batch(tuple(args), kwargs, None), *(_other(args, kwargs, n) for n in range(1, sum(counts)))]
    if graph is not None and assumptions(graph):
        every = [batch if _answers_as_captured(model, graph, batch) else every[0] for batch in every]
    remaining = iter(every)
    return [[next(remaining) for _ in range(count)] for count in counts]


def shortened(steps: Steps, passes: Passes) -> Steps:
    """The batches of a run that takes one pass a step (``one``), ends with the step of two (``two``), or is only that step.

    >>> few = shortened(repeated((), {}, 3), "last")
    >>> len(few)
    1
    """
    middle = len(steps) // 2
    if passes == "one":
        return [batches[:1] for batches in steps]
    return steps if passes == "all" else steps[middle if passes == "last" else 0 : middle + 1]


def told(steps: Steps) -> str:
    """What the passes were given, in words."""
    every = [batch for step in steps for batch in step]
    different = sum(not any(_alike(batch, other) for other in every[:n]) for n, batch in enumerate(every))
    batches = f"{different} different batches" if different > 1 else "one batch"
    text = f"{len(every)} passes on {batches}" if len(every) > 1 else "one pass"
    return text + "".join(f", step {n} adds up two" for n, step in enumerate(steps, 1) if len(step) > 1)


def _other(args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int) -> Batch:
    leaves, spec = flatten_tree((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    extents = [len(tensor) for tensor in tensors if not _counts_up(tensor)]
    few = not extents or max(extents, key=extents.count) <= _FEW
    made = [_changed(leaf, number, few) if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
    new_args, new_kwargs = unflatten_tree(made, spec)
    return Batch(tuple(new_args), new_kwargs)


def _changed(tensor: Tensor, number: int, few: bool) -> Tensor:
    if _counts_up(tensor) or not tensor.numel():
        return tensor.clone()
    if few and tensor.dim() == 1:
        return tensor.clone()  # lengths, perhaps, and those may have to be sorted
    if few:
        number_like = tensor.is_floating_point() or tensor.is_complex()
        wide = [dim for dim in range(1, tensor.dim()) if tensor.shape[dim] > 1 and (dim == 1 or number_like)]
        return tensor.roll(number, wide[0]) if wide else tensor.clone()
    return tensor[rows(len(tensor), number)]


def rows(count: int, number: int) -> Tensor:
    """Which rows of the example make up another batch.

    >>> rows(7, 1), rows(7, 2)
    (tensor([0, 1, 1, 3, 4, 4, 6]), tensor([0, 0, 2, 3, 3, 5, 6]))
    """
    order = torch.arange(count)
    left_out = (order + number) % _PERIOD == 0
    return torch.where(left_out, (order - 1).abs().clamp(max=count - 1), order)


def _counts_up(tensor: Tensor) -> bool:
    """Whether these are positions or offsets: whole numbers that begin at zero and go up along the last dim."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or not tensor.numel():
        return False
    if tensor.shape[-1] <= _FEW:
        return False
    return bool((tensor[..., 0] == 0).all()) and bool((tensor.diff(dim=-1) > 0).all())


def _answers_as_captured(model: torch.nn.Module, graph: Graph, batch: Batch) -> bool:
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad():
            replay(graph, model, batch.args, batch.kwargs)
    except Exception:  # also what the model itself raises: a grid of patches, rolled, may have none
        return False
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    return True


def _alike(one: Batch, other: Batch) -> bool:
    pairs = zip(*(flatten_tree((batch.args, dict(batch.kwargs)))[0] for batch in (one, other)), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs if isinstance(mine, Tensor))
