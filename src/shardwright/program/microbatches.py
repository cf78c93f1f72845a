"""One micro-batch as a graph of its own: time is a mesh axis.

A micro-batch is a cut of the batch loop along an axis whose pieces run one after the other on the same devices, so the rules
by which operators are cut in space say what is exact in time (:mod:`~shardwright.program.batch_cut`): shards are
concatenated in the end, partial sums added up (gradients are sums anyway). What depends on inputs and labels alone (the
number of labels that count) is prepared for the whole batch first. What needs all rows of a batch together and is followed
by no weights (a contrast between rows, the balance of experts) is the *tail*, computed once all micro-batches are through.
Anything else that needs the whole batch is refused by its name. The graph of a micro-batch is an ordinary graph: it is
split, priced, built and run like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Replicate

from shardwright.errors import LoweringError
from shardwright.graph import Graph, Ref
from shardwright.graph.repeats import remembered
from shardwright.operators.rules import Placement
from shardwright.program.batch_cut import REMEDY, Cutter
from shardwright.program.batch_parts import BatchParts
from shardwright.program.mean_losses import losses_as_sums
from shardwright.program.pieces import describe

WHOLE, PER_PIECE = "whole", "per-piece"


@dataclass(frozen=True)
class Microbatches:
    """A graph cut in time. ``sizes`` are the rows of every micro-batch, ``graphs`` those of one micro-batch by its size.

    ``given`` says of every input of those graphs where it comes from: a tensor of the whole batch, and the dim along which
    it is cut (``None``: every micro-batch gets all of it). ``prepared`` computes those that are no inputs of the model
    themselves. ``body`` is the whole graph with the outputs that the micro-batches give, ``joins`` says how theirs become
    those of the batch: concatenated along a ``Shard``'s dim, added up (``Partial``), or all alike; plain values have
    ``None``. ``tail`` computes the model's other outputs from these; without one, the body is the model.
    """

    whole: Graph
    sizes: tuple[int, ...]
    graphs: Mapping[int, Graph]
    given: Mapping[str, tuple[str, int | None]]
    prepared: Graph | None
    joins: tuple[Placement | None, ...]
    body: Graph
    tail: Graph | None = None

    def region(self, extent: int, number: int) -> tuple[int, int]:
        """``[start, stop)`` of a cut dim of so many elements that belong to one micro-batch."""
        rows = extent // sum(self.sizes)
        start = sum(self.sizes[:number])
        return start * rows, (start + self.sizes[number]) * rows


def sizes_of(batch: int, count: int) -> tuple[int, ...]:
    """Rows of every micro-batch: as equal as can be, the larger ones first.

    >>> sizes_of(7, 2), sizes_of(10, 4)
    ((4, 3), (3, 3, 2, 2))
    """
    if not 1 <= count <= batch:
        raise LoweringError(
            f"A batch of {batch} cannot be cut into {count} micro-batches.", "Ask for one row at least in each."
        )
    return tuple(batch // count + (number < batch % count) for number in range(count))


def batch_of(graph: Graph) -> int:
    """Rows of the batch: what most inputs have along their first dim."""
    extents = [graph.tensors[i.tensor].shape[0] for i in graph.inputs if i.tensor and graph.tensors[i.tensor].shape]
    if not extents:
        raise LoweringError("The model has no input with rows.", "Micro-batches are cut from tensors of the call.")
    return max(extents, key=extents.count)


def microbatches(graph: Graph, count: int, batch_norm: str = WHOLE) -> Microbatches:
    """Cut a graph into ``count`` micro-batches along the first dim of its inputs.

    ``batch_norm="per-piece"`` gives every micro-batch statistics of its own, and updates buffers once for each, as one
    process would that runs the micro-batches one after the other: other numbers than those of the whole batch.

    Raises
    ------
    LoweringError
        When an operator needs the whole batch in the middle of the step; the message names it.

    Example
    -------
    >>> microbatches(graph, 4).graphs[2].inputs                                                  # doctest: +SKIP
    """
    return remembered(graph, f"_microbatches_{count}_{batch_norm}", lambda: _cut(graph, count, batch_norm))


def _cut(graph: Graph, count: int, batch_norm: str) -> Microbatches:
    if count == 1:
        kept = {i.tensor: (i.tensor, None) for i in graph.inputs if i.tensor}
        whole = tuple(Replicate() if isinstance(out, Ref) else None for out in graph.outputs)
        return Microbatches(graph, (1,), {1: graph}, kept, None, whole, graph)
    sizes = sizes_of(batch_of(graph), count)
    for buffer, new in graph.mutations if batch_norm != PER_PIECE else ():
        op = graph.producer.get(new)
        where = describe(op) if op is not None else repr(buffer)
        raise LoweringError(
            f"{where}: it changes the buffer {buffer!r}, once for each micro-batch.",
            f"{REMEDY} Batch norms may have statistics of their own in every micro-batch: --batch-norm per-piece.",
        )
    cutter = Cutter(losses_as_sums(graph), sizes, batch_norm == PER_PIECE)
    cutter.walk()
    parts = BatchParts(cutter)
    graphs = {size: parts.graph_of(size) for size in sorted(set(sizes), reverse=True)}
    body = parts.body(graph)
    return Microbatches(graph, sizes, graphs, parts.read, parts.prepared(), parts.joins(body), body, parts.tail())
