"""What a walk through a graph (:mod:`~shardwright.program.batch_cut`) leaves: the graph of a micro-batch of any size, what
is computed for the whole batch before it and after it, and how the outputs of micro-batches are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch.distributed.tensor import Partial, Shard

from shardwright.graph import Graph, Input, Op, Ref, Tensor
from shardwright.graph.core import Value
from shardwright.operators import piece, record
from shardwright.operators.rules import LoopRule, Placement
from shardwright.program.batch_cut import Cutter, Made
from shardwright.program.mean_losses import as_sum, is_sum, mean_as_sum
from shardwright.program.rows_inside import Inside


class BatchParts:
    """The parts of a graph that has been walked through."""

    def __init__(self, cut: Cutter) -> None:
        self.cut = cut

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """What the micro-batches give: the model's outputs, or, where there is a tail, what that reads besides."""
        if not self.cut.late:
            return self.cut.graph.outputs
        early = [o.name for o in self.cut.graph.outputs if isinstance(o, Ref) and o.name not in self.cut.made_late]
        known = self.cut.made_late | set(self.cut.graph.sources) | self.cut.given.keys()
        early += [name for op in self.cut.late for name in op.inputs if name not in known]
        return tuple(Ref(name) for name in dict.fromkeys(early))

    def joins(self, body: Graph) -> tuple[Placement | None, ...]:
        found = [self.cut.state[out.name] if isinstance(out, Ref) else None for out in body.outputs]
        for out, state in zip(body.outputs, found, strict=True):
            if isinstance(state, Inside) and isinstance(out, Ref):
                raise self.cut.refused(self.cut.graph.producer[out.name])
        return tuple(found)  # type: ignore[arg-type]  # none of them is inside

    def body(self, original: Graph) -> Graph:
        """The whole graph with the outputs that the micro-batches give."""
        return replace(self.cut.graph, outputs=self.outputs, output_tree="") if self.cut.late else original

    def tail(self) -> Graph | None:
        if not self.cut.late:
            return None
        graph, late = self.cut.graph, self.cut.made_late
        outputs = tuple(o for o in graph.outputs if isinstance(o, Ref) and o.name in late)
        read = dict.fromkeys(name for op in self.cut.late for name in op.inputs if name not in late)
        inputs = (*graph.inputs, *(Input(name, path=name) for name in read if name not in graph.sources))
        return replace(
            graph, ops=tuple(self.cut.late), inputs=inputs, outputs=outputs, mutations=(), input_tree="", output_tree=""
        )

    @property
    def read(self) -> dict[str, tuple[str, int | None]]:
        """What the micro-batches are given."""
        wanted = {name for _, _, reads in self._live for name in reads}
        wanted |= {o.name for o in self.outputs if isinstance(o, Ref)}
        return {n: where for n, where in self.cut.given.items() if n in wanted or n in self.cut.graph.sources}

    @cached_property
    def _live(self) -> list[Made]:
        """The operators of a micro-batch that its outputs need."""
        wanted = {out.name for out in self.outputs if isinstance(out, Ref)}
        wanted |= {new for _, new in self.cut.graph.mutations}
        live = []
        for op, rule, reads in reversed(self.cut.made):
            if any(name in wanted for name in op.outputs if name) and not self._prepared_already(op):
                wanted.update(reads)
                live.append((op, rule, reads))
        return live[::-1]

    def _prepared_already(self, op: Op) -> bool:
        return all(name is None or name in self.cut.given for name in op.outputs)

    def _meta(self, name: str, size: int) -> Tensor:
        whole = self.cut.graph.tensors[name.rpartition("~")[0] if name in self.cut.copies.values() else name]
        state = self.cut.state[name]
        shape = list(whole.shape)
        if isinstance(state, Shard | Inside):
            shape[state.dim] = shape[state.dim] // self.cut.batch * size
        return replace(whole, name=name, shape=tuple(shape))

    def graph_of(self, size: int) -> Graph:
        """The graph of a micro-batch of so many rows."""
        graph = self.cut.graph
        ops: list[Op] = []
        extra: dict[str, Tensor] = {}
        for op, rule, reads in self._live:
            ops += self._piece(op, rule, reads, size, extra)
        read = {name for op in ops for name in op.inputs} | {o.name for o in self.outputs if isinstance(o, Ref)}
        made = {name for op in ops for name in op.outputs if name is not None}
        inputs = list(graph.inputs)
        known = set(graph.sources)
        inputs += [Input(name, path=name) for name in self.cut.given if name in read and name not in known | made]
        names = [*graph.sources, *(i.tensor for i in inputs if i.tensor and i.tensor not in known)]
        tensors = {name: self._meta(name, size) for name in dict.fromkeys([*names, *(made - extra.keys())])}
        return replace(graph, tensors=tensors | extra, ops=tuple(ops), inputs=tuple(inputs), outputs=self.outputs)

    def _piece(
        self, op: Op, rule: LoopRule | None, reads: tuple[str, ...], size: int, extra: dict[str, Tensor]
    ) -> list[Op]:
        """The operator of one micro-batch: with its sizes, reading its parts."""
        if op.name in self.cut.resized:
            (result,) = (name for name in op.outputs if name)
            shape = self._meta(result, size).shape
            return [_reading(replace(op, args=(*op.args[:-1], shape if op.inputs else shape[0])), reads)]
        if rule is None or not rule.divides or self.cut.normed_alone(op):
            return [_reading(op, reads)]
        if record(op.target).as_sum and isinstance(rule.outputs[0], Partial):
            summed, count = mean_as_sum(op, self.cut.graph.tensors)
            local = {name: self._meta(name, size) for name in (*op.inputs, *op.outputs) if name}
            found = as_sum(op, _reading(summed, reads), local, count)
            extra |= {name: tensor for name, tensor in local.items() if name.endswith("~sum")}
            return found
        if isinstance(rule.outputs[0], Partial) and is_sum(op):
            return [_reading(op, reads)]
        unit = rule.extent // self.cut.batch
        whole = replace(op, outputs=tuple(out and self._original(out) for out in op.outputs))
        made = piece(whole, self.cut.graph.tensors, {rule.name: (0, size * unit)}).op or whole
        return [_reading(replace(made, outputs=op.outputs), reads)]

    def _original(self, name: str) -> str:
        return name.rpartition("~")[0] if name in self.cut.copies.values() else name

    def prepared(self) -> Graph | None:
        """What is computed from the inputs of the whole batch before the first micro-batch."""
        graph = self.cut.graph
        wanted = {source for source, _ in self.read.values() if source in graph.producer}
        wanted |= {n for op in self.cut.late for n in op.inputs if n in self.cut.given and n in graph.producer}
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
