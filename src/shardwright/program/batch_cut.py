"""The walk that cuts a graph into micro-batches: what every tensor is in one of them.

Every operator that reads a cut tensor is cut along the loop that goes with it. An operator for which there is none is done
for the whole batch: before the first micro-batch, where it depends on data alone; after the last one, where nothing with
weights follows; otherwise it is refused by its name. Rows that are sorted and brought back every micro-batch sorts by
itself (:mod:`shardwright.operators.own_orders`); those that lie inside another dim for a while are followed by
:mod:`~shardwright.program.rows_inside`.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import LoweringError
from shardwright.graph import Graph, Op
from shardwright.graph.orders import positions, sorts
from shardwright.operators import analyse, piece, record
from shardwright.operators.rules import OWN, LoopRule, Placement
from shardwright.program.mean_losses import is_sum
from shardwright.program.pieces import describe
from shardwright.program.rows_inside import Inside, State, own_rows, states_inside

REMEDY = (
    "Run the batch in one go (one micro-batch), or leave that operator out of the model that is trained in a pipeline."
)
Made = tuple[Op, LoopRule | None, tuple[str, ...]]
"""An operator of a micro-batch, how it is cut, and what it reads in place of its inputs."""


class Cutter:
    """The walk: what every tensor of the graph is in one micro-batch."""

    def __init__(self, graph: Graph, sizes: tuple[int, ...], per_piece: bool) -> None:
        """``per_piece``: batch norms take the statistics of a micro-batch."""
        self.graph, self.sizes, self.batch, self.per_piece = graph, sizes, sum(sizes), per_piece
        self.state: dict[str, State] = dict.fromkeys(graph.sources, Replicate())
        self.data = set(graph.sources) - {p.tensor for p in graph.parameters}
        """Tensors that depend on inputs, buffers and constants alone."""
        self.aside: set[str] = set()
        """Operators that are done for the whole batch before."""
        self.copies: dict[tuple[str, int], str] = {}
        """Whole tensors of which an operator reads a part, with the dim, and the name of that part."""
        self.made: list[Made] = []
        self.resized: set[str] = set()
        """Operators whose last argument is the shape of their result."""
        self.given: dict[str, tuple[str, int | None]] = {}
        self.late: list[Op] = []
        """Operators that are done for the whole batch afterwards."""
        self.made_late: set[str] = set()
        self.sorts: set[str] = set()
        """Sorts of which every micro-batch sorts its own rows."""

    def walk(self) -> None:
        for entry in self.graph.inputs:
            if entry.tensor is None:
                continue
            shape = self.graph.tensors[entry.tensor].shape
            cut = bool(shape) and shape[0] == self.batch
            self.state[entry.tensor] = Shard(0) if cut else Replicate()
            self.given[entry.tensor] = (entry.tensor, 0 if cut else None)
        for op in self.graph.ops:
            self._walk(op)
        for name in (new for _, new in self.graph.mutations):
            if name in self.made_late or self.state[name] != Replicate():
                raise self.refused(self.graph.producer[name])

    def _walk(self, op: Op) -> None:
        if not self.made_late.isdisjoint(op.inputs):
            self._postpone(op)
            return
        outputs = [name for name in op.outputs if name is not None]
        rule = self._choose(op)
        alone = all(name in self.data for name in op.inputs)
        summed = rule is not None and any(isinstance(p, Partial) for p in rule.outputs)
        cut_off = rule is None and any(not isinstance(self.state[name], Replicate) for name in op.inputs)
        if rule is None and not alone and (sort := self._sort_of(op)) is not None:
            raise self.refused(sort, op)
        if cut_off and (found := states_inside(op, self.state, self.graph, self._plain)) is not None:
            self._make(op, None, self._rebased(op))
            if record(op.target).reshapes:
                self.resized.add(op.name)
            self.state.update({name: state for name, state in zip(op.outputs, found, strict=True) if name is not None})
            return
        if alone and (summed or cut_off):
            self._put_aside(op)
            return
        if cut_off:
            self._postpone(op)
            return
        needs = rule.inputs if rule is not None else (Replicate(),) * len(op.inputs)
        if rule is not None and rule.name == OWN:
            self._make(op, rule, self._rebased(op))
            return
        reads = tuple(self._read(name, need) for name, need in zip(op.inputs, needs, strict=True))  # type: ignore[arg-type]
        self._make(op, rule, reads)
        if alone:
            self.data.update(outputs)

    def _postpone(self, op: Op) -> None:
        """Do an operator once all micro-batches are through."""
        held = self.graph.parameter_of
        heavy = any(name in held and self.graph.tensors[name].elements > 1 for name in op.inputs)
        if heavy or analyse(op, self.graph.tensors).kind == "random":
            raise self.refused(self.late[0] if self.late else op, op)
        for name in op.inputs:
            state = self.state.get(name)
            if isinstance(state, Inside):
                raise self.refused(next(o for o in self.graph.ops if o.name == state.by), op)
            if name in self.data and name in self.graph.producer and isinstance(state, Replicate):
                self._put_aside(self.graph.producer[name])
        self.late.append(op)
        self.made_late.update(name for name in op.outputs if name is not None)

    def refused(self, op: Op, then: Op | None = None) -> LoweringError:
        after = f" {describe(then)} comes after it." if then is not None and then is not op else ""
        return LoweringError(
            f"{describe(op)}: it needs the whole batch, of which a micro-batch has only a part.{after}", REMEDY
        )

    def _rebased(self, op: Op) -> tuple[str, ...]:
        """What an operator on such rows reads: positions in the batch become those in the micro-batch."""
        place = positions(op)
        if place is None or (place == 1 and not own_rows(op, self.graph)):
            return op.inputs
        rows = op.inputs[place]
        part = self.copies[rows, -1] = f"{rows}~rows"
        if part not in self.state:
            arange = self.graph.producer[rows]
            own = replace(arange, name=f"{arange.name}~rows", outputs=(part,))
            self._make(own, None, ())
            self.state[part] = Shard(0)
            self.resized.add(own.name)
        return (*op.inputs[:place], part, *op.inputs[place + 1 :])

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
        if self._sort_of(op) is not None:
            return self._own(op)
        if all(isinstance(self.state[name], Replicate) for name in op.inputs):
            return None
        if self.normed_alone(op):
            return next(r for r in analyse(op, self.graph.tensors).loops if r.inputs[0] == Shard(0))
        if sorts(op) and (own := self._own(op)) is not None:
            return own
        found: list[tuple[int, LoopRule]] = []
        for rule in analyse(op, self.graph.tensors).loops:
            cost = self._cost(op, rule)
            if cost is not None:
                found.append((cost, rule))
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def _sort_of(self, op: Op) -> Op | None:
        """The sort on which an operator hangs, if every micro-batch sorts its own rows."""
        orders = (self.graph.tensors[name].order for name in op.inputs)
        own = next((order.sort for order in orders if order is not None and order.sort in self.sorts), None)
        return next((sort for sort in self.graph.ops if sort.name == own), None) if own is not None else None

    def _own(self, op: Op) -> LoopRule | None:
        """The loop over rows in an order of their own, where the inputs are as it needs them."""
        rule = analyse(op, self.graph.tensors).by_name.get(OWN)
        states = tuple(self.state[name] for name in op.inputs)
        if rule is None or rule.inputs != states or rule.extent % self.batch:
            return None
        if sorts(op):
            self.sorts.add(op.name)
        return rule

    def normed_alone(self, op: Op) -> bool:
        """Whether it is a batch norm with the statistics of a micro-batch."""
        return self.per_piece and record(op.target).batch_statistics and self.state[op.inputs[0]] == Shard(0)

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
        if isinstance(rule.outputs[0], Partial) and (record(op.target).as_sum or is_sum(op)):
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
            if rule.name != OWN and rule.outputs[place] == Shard(dim) and not rule.exchanges and not rule.windowed:
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
