"""Each rank reads its own rows: which ones those are, and how they become one batch again.

Along mesh axes that cut the batch each rank reads a part of it, along the others ranks read the same rows
(:func:`data_axes`). A batch of ``n`` rows is dealt out as evenly as can be; one with fewer rows than parts is read by all.
A call with rows tells the ranks' counts to each other: parts as DTensor cuts them are a DTensor over the mesh at once, any
others are put together, so that the batch is the one that a single process would have had, whatever its size, and every mean
in the model is over its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright._torch_compat import flatten_tree, flatten_with_paths, start_gathering, unflatten_tree
from shardwright.errors import RunError
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.rules import input_layouts, nested_chunk
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.runtime.calling import Calling
from shardwright.runtime.same_rows import digest_of
from shardwright.runtime.shards import distributed
from shardwright.runtime.stages import Stages


def data_axes(graph: Graph, strategy: Strategy) -> tuple[int, ...]:
    """The mesh axes along which some operator reads a part of the rows of an input."""
    inputs = {entry.tensor for entry in graph.inputs if entry.tensor is not None}
    found = {axis for name in inputs for axis, p in enumerate(strategy.resting[name]) if p == Shard(0)}
    for op in graph.ops:
        if inputs.isdisjoint(op.inputs):
            continue
        needs = input_layouts(analyse(op, graph.tensors), strategy.splits[op.name], len(op.inputs))
        for name, need in zip(op.inputs, needs, strict=True):
            if name in inputs:
                found.update(axis for axis, placement in enumerate(need) if placement == Shard(0))
    return tuple(sorted(found))


class Sampler:
    """A batch sampler: the numbers of this rank's rows of every batch. Made by :func:`sampler`."""

    def __init__(self, count: int, batch: int, parts: int, part: int, *, shuffle: bool, seed: int) -> None:
        self.count, self.batch, self.parts, self.part = count, batch, parts, part
        self.shuffle, self.seed, self.epoch, self.start = shuffle, seed, 0, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Shuffle anew for this epoch; ``start`` leaves out as many batches, as a resumed run wants it."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return -(-self.count // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.count)
        if self.shuffle:
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for rows in order.split(self.batch)[self.start :]:
            dealt = [rows] * self.parts if len(rows) < self.parts else rows.tensor_split(self.parts)
            yield dealt[self.part].tolist()


def sampler(
    dataset: Sized,
    plan: Plan,
    batch: int | None = None,
    *,
    shuffle: bool = False,
    seed: int = 0,
    rank: int | None = None,
) -> Sampler:
    """What ``DataLoader(dataset, batch_sampler=...)`` needs so that each rank reads only its rows of every batch.

    Parameters
    ----------
    batch
        Rows of a whole batch (default: the plan's). The last one has what is left.
    shuffle, seed
        Another order in every epoch (:meth:`Sampler.set_epoch`), the same on every rank.
    rank
        Whose rows (default: this process's).

    Examples
    --------
    >>> rows = shardwright.sampler(dataset, plan, shuffle=True)                                 # doctest: +SKIP
    >>> model = shardwright.parallelize(model, plan, inputs="rows")                             # doctest: +SKIP
    >>> for x, y in DataLoader(dataset, batch_sampler=rows): model(x, y).backward()             # doctest: +SKIP
    """
    strategy, inputs = plan.stages[0].strategy, plan.signature.inputs
    rows = batch if batch is not None else next((shape[0] for _, _, shape in inputs if shape), None)
    if not rows:
        raise RunError("The plan knows no batch.", "Say how many rows a batch has: sampler(dataset, plan, batch=32).")
    number = torch.distributed.get_rank() if rank is None else rank
    if len(plan.stages) > 1 or plan.microbatches > 1:  # cut in time: whoever reads what, all of it is put together
        return Sampler(len(dataset), rows, plan.devices, plan.ranks.index(number), shuffle=shuffle, seed=seed)
    coordinate = [int(c) for c in torch.unravel_index(torch.tensor(number), strategy.sizes)]
    part, parts = 0, 1
    for axis in data_axes(plan.graph(trusted=True), strategy):
        part, parts = part * strategy.sizes[axis] + coordinate[axis], parts * strategy.sizes[axis]
    return Sampler(len(dataset), rows, parts, part, shuffle=shuffle, seed=seed)


class Rows:
    """Makes the batch of a call from the rows that the ranks bring."""

    def __init__(self, stages: Stages, calling: Calling | None) -> None:
        graph, lines = stages.graph, stages.lines
        if not lines:
            raise RunError(
                "This rank has no stage, and rows are put together by those that have.", "Give whole batches."
            )
        self._mesh, self._calling, self._axes = stages.mesh, calling, tuple(range(len(lines)))
        self._in_parts = stages.on_one_mesh
        """Whether a mesh that takes the batch in one go takes it in parts, too."""
        if self._in_parts:
            self._axes = data_axes(graph, stages.plan.stages[0].strategy)
        self._lines = [lines[axis] for axis in self._axes]
        self._layout = tuple(Shard(0) if axis in self._axes else Replicate() for axis in range(len(lines)))
        given = [(entry.path, graph.tensors[entry.tensor].shape) for entry in graph.inputs if entry.tensor is not None]
        rows = next((shape[0] for _, shape in given if shape), 0)
        self._whole = {self._argument(path) for path, shape in given if not shape or shape[0] != rows}
        """Arguments of the planned call that have no rows."""

    def _argument(self, path: str) -> str:
        return path if self._calling is None else self._calling.argument(path)

    def batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with the whole batch in place of this rank's rows."""
        paths = [self._argument(path) for path, _ in flatten_with_paths((args, dict(kwargs)))]
        leaves, spec = flatten_tree((args, dict(kwargs)))
        places = [i for i, leaf in enumerate(leaves) if self._has_rows(paths[i], leaf)]
        if not places or not self._axes:
            return args, dict(kwargs)
        table = self._gathered(torch.tensor([[leaves[i].shape[0] for i in places]]))
        rows = table[:, 0].tolist()
        for column, place in enumerate(places):
            if table[:, column].tolist() == rows:
                leaves[place] = self._joined(leaves[place], rows)
        args, kwargs = unflatten_tree(leaves, spec)
        return args, dict(kwargs)

    def _has_rows(self, path: str, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.ndim > 0 and path not in self._whole

    def _gathered(self, mine: Tensor) -> Tensor:
        """What all parts say, in the order of the parts."""
        device = torch.device(self._mesh.device_type)
        for line in reversed(self._lines):
            mine = start_gathering(mine.to(device).contiguous(), line.size, line.group).wait()
        return mine.cpu()

    def _joined(self, mine: Tensor, rows: list[int]) -> Tensor:
        shape = (sum(rows), *mine.shape[1:])
        if len(set(rows)) == 1 and rows[0] < len(rows):
            digests = self._gathered(digest_of(mine, 0).view(1, 1)).flatten().tolist()
            if len(set(digests)) == 1:
                return mine  # fewer rows than parts: everybody has read them all
        if self._in_parts and rows == self._as_dtensors(shape[0]):
            device = torch.device(self._mesh.device_type)
            return distributed(mine.to(device), self._mesh, self._layout, shape)
        padded = torch.cat([mine, mine.new_zeros((max(rows) - len(mine), *mine.shape[1:]))])
        parts = self._gathered(padded).split(max(rows))
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def _as_dtensors(self, total: int) -> list[int]:
        sizes = [line.size for line in self._lines]
        found = []
        for number in range(torch.Size(sizes).numel()):
            places = [int(i) for i in torch.unravel_index(torch.tensor(number), sizes)]
            start, stop = nested_chunk(total, list(zip(sizes, places, strict=True)))
            found.append(stop - start)
        return found
