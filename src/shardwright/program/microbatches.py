"""One micro-batch as a graph of its own: time is a mesh axis.

A micro-batch is a cut of the batch loop along an axis whose pieces run one after the other on the same devices, so the rules
by which operators are cut in space say what is exact in time. Walking through the graph, every operator that reads a cut
tensor is cut along the loop that goes with it: shards are concatenated in the end, partial sums added up (gradients are sums
anyway), and an operator that needs the whole batch in the middle of the step is refused by its name. What depends on inputs
and labels alone (the number of labels that count) is prepared for the whole batch first. The graph of a micro-batch is an
ordinary graph: it is split, priced, built and run like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import LoweringError
from shardwright.graph import Graph, Input, Op, Ref, Tensor
from shardwright.graph.core import Value
from shardwright.operators import analyse, piece
from shardwright.operators.rules import LoopRule, Placement
from shardwright.program.means import MEANS, as_sum, is_sum, losses_as_sums, mean_as_sum
from shardwright.program.pieces import describe

REMEDY = (
    "Run the batch in one go (one micro-batch), or leave that operator out of the model that is trained in a pipeline."
)


@dataclass(frozen=True)
class Microbatches:
    """A graph cut in time. ``sizes`` are the rows of every micro-batch, ``graphs`` those of one micro-batch by its size.

    ``given`` says of every input of those graphs where it comes from: a tensor of the whole batch, and the dim along which
    it is cut (``None``: every micro-batch gets all of it). ``prepared`` computes those that are no inputs of the model
    themselves. ``joins`` says how the outputs of the micro-batches become those of the batch: concatenated along a
    ``Shard``'s dim, added up (``Partial``), or all alike; plain values have ``None``.
    """

    whole: Graph
    sizes: tuple[int, ...]
    graphs: Mapping[int, Graph]
    given: Mapping[str, tuple[str, int | None]]
    prepared: Graph | None
    joins: tuple[Placement | None, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(sum(self.sizes[:number]) for number in range(len(self.sizes)))

    def region(self, extent: int, number: int) -> tuple[int, int]:
        """``[start, stop)`` of a cut dim of so many elements that belong to one micro-batch."""
        rows = extent // sum(self.sizes)
        return self.starts[number] * rows, (self.starts[number] + self.sizes[number]) * rows


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


def microbatches(graph: Graph, count: int) -> Microbatches:
    """Cut a graph into ``count`` micro-batches along the first dim of its inputs.

    Raises
    ------
    LoweringError
        When an operator needs the whole batch in the middle of the step; the message names it.

    Example
    -------
    >>> microbatches(graph, 4).graphs[2].inputs                                                  # doctest: +SKIP
    """
    if count == 1:
        kept = {i.tensor: (i.tensor, None) for i in graph.inputs if i.tensor}
        whole = tuple(Replicate() if isinstance(out, Ref) else None for out in graph.outputs)
        return Microbatches(graph, (1,), {1: graph}, kept, None, whole)
    sizes = sizes_of(batch_of(graph), count)
    for buffer, new in graph.mutations:
        op = graph.producer.get(new)
        where = describe(op) if op is not None else repr(buffer)
        raise LoweringError(f"{where}: it changes the buffer {buffer!r}, once for each micro-batch.", REMEDY)
    return _Cutter(losses_as_sums(graph), sizes).cut(graph)


class _Cutter:
    """The walk: what every tensor of the graph is in one micro-batch."""

    def __init__(self, graph: Graph, sizes: tuple[int, ...]) -> None:
        self.graph, self.sizes, self.batch = graph, sizes, sum(sizes)
        self.state: dict[str, Placement] = dict.fromkeys(graph.sources, Replicate())
        self.data = set(graph.sources) - {p.tensor for p in graph.parameters}
        """Tensors that depend on inputs, buffers and constants alone."""
        self.rule: dict[str, LoopRule | None] = {}
        self.aside: set[str] = set()
        """Operators that are done for the whole batch before."""
        self.copies: dict[tuple[str, int], str] = {}
        """Whole tensors of which an operator reads a part, with the dim, and the name of that part."""
        self.made: list[tuple[Op, LoopRule | None, tuple[str, ...]]] = []
        """Operators of a micro-batch in order, how each is cut, and what it reads in place of its inputs."""
        self.given: dict[str, tuple[str, int | None]] = {}

    def cut(self, original: Graph) -> Microbatches:
        for entry in self.graph.inputs:
            if entry.tensor is None:
                continue
            shape = self.graph.tensors[entry.tensor].shape
            cut = bool(shape) and shape[0] == self.batch
            self.state[entry.tensor] = Shard(0) if cut else Replicate()
            self.given[entry.tensor] = (entry.tensor, 0 if cut else None)
        for op in self.graph.ops:
            self._walk(op)
        joins = tuple(self._join(out) for out in self.graph.outputs)
        live = self._live()
        graphs = {size: self._graph(size, live) for size in sorted(set(self.sizes), reverse=True)}
        read = {name for op, _, reads in live for name in reads} | {
            o.name for o in self.graph.outputs if isinstance(o, Ref)
        }
        given = {name: where for name, where in self.given.items() if name in read or name in self.graph.sources}
        return Microbatches(original, self.sizes, graphs, given, self._prepared(given), joins)

    def _walk(self, op: Op) -> None:
        outputs = [name for name in op.outputs if name is not None]
        rule = self._choose(op)
        alone = all(name in self.data for name in op.inputs)
        summed = rule is not None and any(isinstance(p, Partial) for p in rule.outputs)
        cut_off = rule is None and any(not isinstance(self.state[name], Replicate) for name in op.inputs)
        if alone and (summed or cut_off):
            self._put_aside(op)
            return
        if cut_off:
            raise LoweringError(
                f"{describe(op)}: it needs the whole batch, of which a micro-batch has only a part.", REMEDY
            )
        needs = rule.inputs if rule is not None else (Replicate(),) * len(op.inputs)
        reads = tuple(self._read(name, need) for name, need in zip(op.inputs, needs, strict=True))  # type: ignore[arg-type]
        self._make(op, rule, reads)
        if alone:
            self.data.update(outputs)

    def _make(self, op: Op, rule: LoopRule | None, reads: tuple[str, ...]) -> None:
        self.made.append((op, rule, reads))
        for place, name in enumerate(op.outputs):
            if name is not None:
                self.state[name] = Replicate() if rule is None else rule.outputs[place]

    def _put_aside(self, op: Op) -> None:
        """Do an operator, and what leads to it, for the whole batch before the first micro-batch."""
        pending = [op]
        while pending:
            this = pending.pop()
            if this.name in self.aside:
                continue
            self.aside.add(this.name)
            pending += [self.graph.producer[name] for name in this.inputs if name in self.graph.producer]
        for name in op.outputs:
            if name is not None:
                self.state[name] = Replicate()
                self.given[name] = (name, None)
                self.data.add(name)

    def _choose(self, op: Op) -> LoopRule | None:
        """The loop that goes with what its inputs are; the one that reads the fewest parts of whole tensors."""
        if all(isinstance(self.state[name], Replicate) for name in op.inputs):
            return None
        found: list[tuple[int, LoopRule]] = []
        for rule in analyse(op, self.graph.tensors).loops:
            cost = self._cost(op, rule)
            if cost is not None:
                found.append((cost, rule))
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def _cost(self, op: Op, rule: LoopRule) -> int | None:
        if rule.exchanges or rule.windowed or (rule.divides and rule.extent % self.batch):
            return None
        cost = 0
        for name, need in zip(op.inputs, rule.inputs, strict=True):
            state = self.state[name]
            if need == state:
                continue
            if not isinstance(need, Shard) or not isinstance(state, Replicate) or not self._may_cut(name, need.dim):
                return None
            cost += 1
        return cost if self._plain(op, rule) else None

    def _plain(self, op: Op, rule: LoopRule) -> bool:
        """Whether the operator itself computes the piece, wherever the piece lies."""
        if not rule.divides:
            return True
        if isinstance(rule.outputs[0], Partial) and (op.target in MEANS or is_sum(op)):
            return True
        unit = rule.extent // self.batch
        starts: dict[int, Op] = {}
        for size in set(self.sizes):
            for start in (0, self.batch - size):
                made = piece(op, self.graph.tensors, {rule.name: (start * unit, (start + size) * unit)})
                if made.kernel is not None or starts.setdefault(size, made.op or op) != (made.op or op):
                    return False
        return True

    def _may_cut(self, name: str, dim: int) -> bool:
        """Whether a part of a tensor that every micro-batch has whole can be had by itself."""
        shape = self.graph.tensors[name].shape
        return shape[dim] % self.batch == 0 and (name in self.data or self._maker(name, dim) is not None)

    def _maker(self, name: str, dim: int) -> LoopRule | None:
        """How the operator that makes a whole tensor makes a part of it."""
        op = self.graph.producer.get(name)
        if op is None or op.name in self.aside:
            return None
        place = op.outputs.index(name)
        for rule in analyse(op, self.graph.tensors).loops:
            if rule.outputs[place] == Shard(dim) and not rule.exchanges and not rule.windowed:
                even = rule.extent % self.batch == 0
                whole = all(
                    isinstance(need, Replicate) or (isinstance(need, Shard) and self._may_cut(read, need.dim))
                    for need, read in zip(rule.inputs, op.inputs, strict=True)
                )
                if even and whole and self._plain(op, rule):
                    return rule
        return None

    def _read(self, name: str, need: Placement) -> str:
        """The tensor to read: itself, or the part that a micro-batch needs of one that it has whole."""
        if need == self.state[name] or not isinstance(need, Shard):
            return name
        key = (name, need.dim)
        if key not in self.copies:
            part = self.copies[key] = f"{name}~{need.dim}"
            rule = self._maker(name, need.dim)
            if rule is None:
                self.given[part] = (name, need.dim)
                self.state[part] = need
                if (maker := self.graph.producer.get(name)) is not None:
                    self._put_aside(maker)
            else:
                op = self.graph.producer[name]
                outputs = tuple(part if out == name else None for out in op.outputs)
                again = replace(op, name=f"{op.name}~{need.dim}", outputs=outputs)
                reads = tuple(self._read(n, d) for n, d in zip(op.inputs, rule.inputs, strict=True))  # type: ignore[arg-type]
                self._make(again, rule, reads)
        return self.copies[key]

    def _join(self, out: Value) -> Placement | None:
        return self.state[out.name] if isinstance(out, Ref) else None

    def _live(self) -> list[tuple[Op, LoopRule | None, tuple[str, ...]]]:
        """The operators of a micro-batch that its outputs need."""
        wanted = {out.name for out in self.graph.outputs if isinstance(out, Ref)}
        live = []
        for op, rule, reads in reversed(self.made):
            if any(name in wanted for name in op.outputs if name) and not self._prepared_already(op):
                wanted.update(reads)
                live.append((op, rule, reads))
        return live[::-1]

    def _prepared_already(self, op: Op) -> bool:
        return all(name is None or name in self.given for name in op.outputs)

    def _meta(self, name: str, size: int) -> Tensor:
        whole = self.graph.tensors[name.rpartition("~")[0] if name in self.copies.values() else name]
        state = self.state[name]
        shape = list(whole.shape)
        if isinstance(state, Shard):
            shape[state.dim] = shape[state.dim] // self.batch * size
        return replace(whole, name=name, shape=tuple(shape))

    def _graph(self, size: int, live: Sequence[tuple[Op, LoopRule | None, tuple[str, ...]]]) -> Graph:
        graph = self.graph
        ops: list[Op] = []
        extra: dict[str, Tensor] = {}
        for op, rule, reads in live:
            ops += self._piece(op, rule, reads, size, extra)
        read = {name for op in ops for name in op.inputs} | {o.name for o in graph.outputs if isinstance(o, Ref)}
        made = {name for op in ops for name in op.outputs if name is not None}
        inputs = list(graph.inputs)
        known = set(graph.sources)
        inputs += [Input(name, path=name) for name in self.given if name in read and name not in known | made]
        names = [*graph.sources, *(i.tensor for i in inputs if i.tensor and i.tensor not in known)]
        tensors = {name: self._meta(name, size) for name in dict.fromkeys([*names, *(made - extra.keys())])}
        return replace(graph, tensors=tensors | extra, ops=tuple(ops), inputs=tuple(inputs), mutations=())

    def _piece(
        self, op: Op, rule: LoopRule | None, reads: tuple[str, ...], size: int, extra: dict[str, Tensor]
    ) -> list[Op]:
        """The operator of one micro-batch: with its sizes, reading its parts."""
        if rule is None or not rule.divides:
            return [_reading(op, reads)]
        if op.target in MEANS and isinstance(rule.outputs[0], Partial):
            summed, count = mean_as_sum(op, self.graph.tensors)
            local = {name: self._meta(name, size) for name in (*op.inputs, *op.outputs) if name}
            found = as_sum(op, _reading(summed, reads), local, count)
            extra |= {name: tensor for name, tensor in local.items() if name.endswith("~sum")}
            return found
        if isinstance(rule.outputs[0], Partial) and is_sum(op):
            return [_reading(op, reads)]
        unit = rule.extent // self.batch
        whole = replace(op, outputs=tuple(out and self._original(out) for out in op.outputs))
        made = piece(whole, self.graph.tensors, {rule.name: (0, size * unit)}).op or whole
        return [_reading(replace(made, outputs=op.outputs), reads)]

    def _original(self, name: str) -> str:
        return name.rpartition("~")[0] if name in self.copies.values() else name

    def _prepared(self, given: Mapping[str, tuple[str, int | None]]) -> Graph | None:
        """What is computed from the inputs of the whole batch before the first micro-batch."""
        graph = self.graph
        wanted = {source for source, _ in given.values() if source in graph.producer}
        if not wanted:
            return None
        outputs = tuple(Ref(name) for name in sorted(wanted))
        ops = []
        for op in reversed(graph.ops):
            if any(name in wanted for name in op.outputs if name):
                wanted.update(op.inputs)
                ops.append(op)
        return replace(graph, ops=tuple(reversed(ops)), outputs=outputs, mutations=(), output_tree="")


def _reading(op: Op, names: Sequence[str]) -> Op:
    """The same operator reading other tensors, in the order of ``Op.inputs``."""
    left = iter(names)

    def renamed(value: Value) -> Value:
        if isinstance(value, Ref):
            return Ref(next(left))
        return tuple(renamed(item) for item in value) if isinstance(value, tuple) else value

    args = tuple(renamed(value) for value in op.args)
    return replace(op, args=args, kwargs=tuple((key, renamed(value)) for key, value in op.kwargs))
