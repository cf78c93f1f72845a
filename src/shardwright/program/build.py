"""The builder: what one rank does in one step, from graph, strategy, the rank's coordinate and what was decided.

Forward operators and the changes of layout between them come in the order of the model; parameters are gathered in bundles,
some bytes ahead of use. The backward pass goes through the same nodes in opposite order, as autograd does: the gradients of
an operator's inputs, then those of its weights, then the duals of changes of layout; a recomputed block runs forward once
more when its backward first asks for what was not kept; gradients of parameters travel home while the backward pass goes on;
the optimizer ends the step. This is the only place where the order of a step is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import zip_longest

from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.program.blocks import RecomputedBlock, blocks
from shardwright.program.bundles import Read, bundles
from shardwright.program.dataflow import Compute, Dataflow, LayoutChange, Node, dataflow
from shardwright.program.decisions import Decisions
from shardwright.program.footprints import Strided, backward
from shardwright.program.gradients import GradientFlow
from shardwright.program.instructions import Kind, Phase, Program
from shardwright.program.nodes import exchanges, followed, kept_outputs, made, read, read_directly, saves, wanted
from shardwright.program.passes import built_sections
from shardwright.program.reading import Reading
from shardwright.program.writer import ProgramWriter


def build(
    graph: Graph,
    strategy: Strategy,
    decisions: Decisions,
    coordinate: Sequence[int] | None = None,
    *,
    device: str = "cpu",
    training: bool = True,
    optimizer: str = "adamw",
    sent: Collection[str] = (),
) -> Program:
    """The program of the rank at ``coordinate`` (by default the first) on this kind of device; gradients of any of its
    results may come back. ``sent``: of a stage, the results that other stages read.

    Raises
    ------
    LoweringError
        When the strategy cannot be run; the message names the operator.

    Example
    -------
    >>> program = build(graph, stage.strategy, stage.decisions, (0, 1))                          # doctest: +SKIP
    >>> [i.name for i in program.instructions if i.kind is Kind.GATHER]                          # doctest: +SKIP
    """
    place = (0,) * len(strategy.axes) if coordinate is None else coordinate
    flow = dataflow(graph, strategy, place, decisions, device, training, sent)
    return _Builder(flow, decisions, optimizer).build()


class _Builder:
    def __init__(self, flow: Dataflow, decisions: Decisions, optimizer: str) -> None:
        self.flow, self.optimizer, self.sizes = flow, optimizer, decisions.sizes
        self.writer = ProgramWriter(flow)
        self.where: dict[int, int] = {}
        """Values of the flow that are not in the slot of their own number → where they are now."""
        self.gradient: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.lies: dict[int, Strided] = {}
        self.sharing: Counter[int] = Counter()
        """Per storage, how many gradients that are still to be read lie in it."""
        self.saved: dict[int, int] = {}
        self.blocks = blocks(flow)
        self.again = frozenset(number for block in self.blocks.values() for number in block.again)
        self.recomputed: set[RecomputedBlock] = set()
        self.backward_of = self._with_backward()
        gathers, scatters = self._bundles()
        self.reading = Reading(self.writer, gathers, self.blocks, self.backward_of, self.sizes.ahead)
        self.gradient_flow = GradientFlow(self.writer, decisions, scatters)

    def build(self) -> Program:
        for number, node in enumerate(self.flow.nodes):
            keeps = number in self.backward_of and number not in self.again
            self._forward(number, node, Phase.FORWARD, keeps)
        forward = len(self.writer.instructions)
        handed_out = {self._at(v) for v in (*self.flow.results, *(value for _, value in self.flow.mutations))}
        results = dict(self.where)
        roots: dict[int, int] = {}
        if self.flow.training and self.flow.roots:
            roots = {root: self._root(root) for root in self.flow.roots}
            self._backward()
        instructions, slots = self.writer.finished(handed_out)
        return Program(
            self.flow,
            instructions,
            slots,
            tuple(self.gradient_flow.buckets),
            self.sizes,
            self.optimizer,
            built_sections(instructions, forward),
            self.gradients,
            roots,
            self.again,
            self.saved,
            {value: slot for value, slot in results.items() if slot in handed_out},
        )

    def _bundles(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The nodes whose parameters are gathered together, and those whose gradients are scattered together."""
        flow = self.flow
        reads = [
            (number, node) for number, node in enumerate(flow.nodes) if isinstance(node, LayoutChange) and node.reads
        ]
        described = [Read(flow.values[node.result].tensor, node.operator, node.route) for _, node in reads]
        recomputed = flow.strategy.recomputed if flow.training else ()
        found = bundles(flow.graph, described, self.sizes.bundle, flow.strategy.whole_gradients, recomputed)
        return tuple(
            tuple(tuple(reads[i][0] for i in bundle) for bundle in way) for way in (found.gathers, found.scatters)
        )

    def _with_backward(self) -> set[int]:
        """The nodes through which gradients flow back."""
        flow, arriving, found = self.flow, set(self.flow.roots), set()
        for number in reversed(range(len(flow.nodes))):
            node = flow.nodes[number]
            if not any(value in arriving for value in made(node)):
                continue
            follows = [v for v in followed(node) if flow.values[v].local.grad]
            if follows:
                found.add(number)
                arriving.update(follows)
        return found

    def _at(self, value: int) -> int:
        return self.where.get(value, value)

    def _forward(self, number: int, node: Node, phase: Phase, keeps: bool) -> None:
        """A node of a forward pass; ``keeps``: what its backward will need of its own is kept."""
        if isinstance(node, Compute):
            self._operator(number, node, phase, keeps)
        elif number in self.reading.places:
            self.where[node.result] = self.reading.take(number, phase)
        else:
            slot, role = self._at(node.source), "gathered" if node.reads else "value"
            for step, bound in zip(node.route.forward, node.forward, strict=True):
                slot = self.writer.step(
                    step,
                    bound,
                    phase,
                    slot,
                    tensor=self.flow.values[node.result].tensor,
                    module=node.module,
                    node=number,
                    role=role,
                )
            self.where[node.result] = slot

    def _operator(self, number: int, node: Compute, phase: Phase, keeps: bool) -> None:
        writer, footprint, again = self.writer, node.footprint, phase is Phase.RECOMPUTE
        reads = [self._reread(value, number) if again else self._at(value) for value in node.inputs]
        owners: dict[int, int] = {}
        writes: list[int] = []
        # Values whose results were not looked at are taken to be as large as they should be.
        for value, result in zip_longest(node.outputs, footprint.results):
            if value is None:
                continue
            tensor, alias, size = self.flow.values[value].tensor, -1, self.flow.values[value].local.bytes
            if result is not None and result.owner >= 0:
                alias, size = owners.get(result.owner, -1), footprint.fresh[result.owner]
            elif result is not None:
                alias = reads[-1 - result.owner]
            slot = writer.slot(tensor, "value", size, alias, None if again else value)
            if again:
                self.where[value] = slot
            if result is not None and result.owner >= 0:
                owners.setdefault(result.owner, slot)
            writes.append(slot)
        own = sum(footprint.fresh[i] for i in footprint.saved_fresh if i not in owners) if keeps else 0
        if keeps:
            self.saved[number] = writer.slot(node.op.name, "saved", own)
            writes.append(self.saved[number])
        left = sum(size for i, size in enumerate(footprint.fresh) if i not in owners) - own
        writer.compute(
            Kind.OPERATOR,
            phase,
            node.op.name,
            reads,
            writes,
            module=node.op.module,
            node=number,
            temporary=footprint.temporary + left,
        )
        self._exchanges(number, node, phase)

    def _exchanges(self, number: int, node: Compute, phase: Phase) -> None:
        """The statistics that the pieces of an operator exchange inside its call."""
        for axis, size, times in exchanges(self.flow, node):
            for _ in range(times if phase is Phase.BACKWARD else 1):
                started = self.writer.communicate(
                    Kind.EXCHANGE,
                    phase,
                    node.op.name,
                    "all_reduce",
                    axis,
                    size,
                    module=node.op.module,
                    node=number,
                )
                self.writer.wait(started, phase)

    def _root(self, root: int) -> int:
        """The gradient that the backward pass starts with: somebody else's tensor."""
        local = self.flow.values[root].local
        slot = self.writer.slot(self.flow.values[root].tensor, "gradient", 0)
        self.gradient[root], self.lies[slot] = slot, local.without_gradient
        self.sharing[slot] += 2
        return slot

    def _backward(self) -> None:
        flow = self.flow
        waiting = Counter(value for node in flow.nodes for value in set(read_directly(node)))
        shares = self._shares()
        for number in reversed(range(len(flow.nodes))):
            node = flow.nodes[number]
            if number in self.backward_of and any(value in self.gradient for value in made(node)):
                if isinstance(node, Compute):
                    self._operator_backward(number, node)
                else:
                    self._change_backward(number, node, shares)
            for value in dict.fromkeys(read_directly(node)):
                waiting[value] -= 1
                if waiting[value] == 0:
                    self._read_at_rest(value, shares)
        for value, slot in self.gradient.items():
            self.gradients[value] = slot
        self.reading.finish()
        self.gradient_flow.finish()
        sources = {v for t, v in flow.rest.items() if t not in flow.graph.parameter_of}
        inputs = [slot for value, slot in self.gradients.items() if value in sources]
        self.writer.compute(Kind.UPDATE, Phase.UPDATE, self.optimizer, (*self.gradient_flow.complete, *inputs))

    def _shares(self) -> Counter[str]:
        """Per parameter, how many reads of it bring a gradient: one for all that use it as it rests, one per change."""
        readers: set[tuple[str, int]] = set()
        for number, node in enumerate(self.flow.nodes):
            for value in set(read(node)):
                tensor = self.flow.values[value].tensor
                if self.flow.rest.get(tensor) == value and tensor in self.flow.graph.parameter_of:
                    readers.add((tensor, number if isinstance(node, LayoutChange) else -1))
        return Counter(tensor for tensor, _ in readers)

    def _arrived(self, value: int) -> int:
        """The complete gradient of a value, read for the last time."""
        slot = self.gradients[value] = self.gradient.pop(value)
        return slot

    def _operator_backward(self, number: int, node: Compute) -> None:
        if number in self.blocks and saves(node) and self.blocks[number] not in self.recomputed:
            self._recompute(self.blocks[number])
        values, weights = wanted(self.flow, node)
        reads = [self._saved_value(value, number) for value in self._kept(node)]
        reads += [self.saved[number]] if number in self.saved else []
        count = len(node.footprint.results)
        arrived = [self._arrived(o) if o is not None and o in self.gradient else None for o in node.outputs]
        arrived = (arrived + [None] * count)[:count]
        given = tuple(self.flow.values[i].local for i in node.inputs)
        laid = tuple(None if a is None else self.lies[a] for a in arrived)
        result = backward(node.call, given, laid, self.flow.device, node.kernel)
        grads = [a for a in arrived if a is not None]
        fresh: dict[int, int] = {}
        deposits: list[tuple[int, int]] = []

        def written(chosen: tuple[int, ...]) -> list[int]:
            slots = []
            for value in chosen:
                found = result.gradients[node.inputs.index(value)]
                if found is None:
                    continue
                alias = arrived[-1 - found.owner] if found.owner < 0 else fresh.get(found.owner, -1)
                size = result.fresh[found.owner] if found.owner >= 0 else 0
                slot = self.writer.slot(
                    self.flow.values[value].tensor, "gradient", size, -1 if alias is None else alias
                )
                if found.owner >= 0:
                    fresh.setdefault(found.owner, slot)
                self.lies[slot] = found.tensor.without_gradient
                self.sharing[self.writer.root(slot)] += 1
                # What lies in a saved tensor must not be added to.
                self.sharing[slot] += found.owner >= 0 and not size
                slots.append(slot)
                deposits.append((value, slot))
            return slots

        parts = [(Kind.INPUT, values), (Kind.WEIGHT, weights)] if weights else [(Kind.OPERATOR, values)]
        unclaimed = sum(result.fresh) - sum(
            result.fresh[f.owner] for f in {r.owner: r for r in result.gradients if r and r.owner >= 0}.values()
        )
        for kind, chosen in parts:
            self.writer.compute(
                kind,
                Phase.BACKWARD,
                node.op.name,
                (*grads, *reads),
                written(chosen),
                module=node.op.module,
                node=number,
                temporary=result.temporary + unclaimed,
                early=self._early(number, node, result.early) if kind is parts[-1][0] else (),
            )
        self._exchanges(number, node, Phase.BACKWARD)
        for slot in grads:
            self.sharing[self.writer.root(slot)] -= 1
        for value, slot in deposits:
            self._deposit(value, slot)

    def _early(self, number: int, node: Compute, early: Sequence[int]) -> tuple[int, ...]:
        """The values that lie in storages of the forward call which its backward frees on the way."""
        found = []
        for value, result in zip(node.outputs, node.footprint.results, strict=False):
            if value is not None and result is not None and result.owner in early:
                found.append(self._at(value))
        own = [i for i in node.footprint.saved_fresh if not any(r and r.owner == i for r in node.footprint.results)]
        if own and number in self.saved and all(i in early for i in own):
            found.append(self.saved[number])
        return tuple(found)

    def _kept(self, node: Compute) -> tuple[int, ...]:
        inputs = (node.inputs[i] for i in node.footprint.saved_inputs)
        return tuple(dict.fromkeys((*inputs, *kept_outputs(node))))

    def _saved_value(self, value: int, reader: int) -> int:
        """Where a value is that the backward of a node reads: gathered again, computed again, or kept."""
        again = self.reading.again(self.flow.roots_of[value], reader)
        return self._at(value) if again is None else again

    def _reread(self, value: int, reader: int) -> int:
        """Where a value is that a node reads when it runs again; a view is made again from what was gathered again."""
        return self._saved_value(value, reader) if self.flow.roots_of[value] == value else self._at(value)

    def _recompute(self, block: RecomputedBlock) -> None:
        """The forward pass of a block once more, or of what is cheap in it. Parameters are read again too, ahead of use."""
        self.recomputed.add(block)
        for number in block.again:
            self._forward(number, self.flow.nodes[number], Phase.RECOMPUTE, keeps=number in self.backward_of)

    def _change_backward(self, number: int, node: LayoutChange, shares: Counter[str]) -> None:
        source = self.flow.values[node.source]
        slot, steps = self._arrived(node.result), tuple(zip(node.route.backward, node.backward, strict=True))
        name = source.tensor
        self.sharing[self.writer.root(slot)] -= 1
        if node.reads:
            self.reading.drop(number)
            self._reduce_gradient(name, number, steps, slot, shares[name] == 1, node.module)
            return
        for step, bound in steps:
            slot = self.writer.step(
                step, bound, Phase.BACKWARD, slot, tensor=name, role="gradient", module=node.module, node=number
            )
        if steps or slot not in self.lies:
            self.lies[slot] = Strided.contiguous(source.local.shape, source.local.dtype)
        self.sharing[self.writer.root(slot)] += 1
        self._deposit(node.source, slot)

    def _reduce_gradient(self, tensor: str, number: int, steps: tuple, slot: int, alone: bool, module: str) -> None:
        arrived = self.writer.slot(tensor, "gradient", 0, slot)
        self.writer.compute(Kind.ARRIVE, Phase.BACKWARD, tensor, (slot,), (arrived,), module=module, node=number)
        self.gradient_flow.add(tensor, number, steps, arrived, alone, module)

    def _read_at_rest(self, value: int, shares: Counter[str]) -> None:
        """All operators that use a parameter as it rests have given their gradients."""
        tensor = self.flow.values[value].tensor
        parameter = self.flow.graph.parameter_of.get(tensor)
        if parameter is None or self.flow.rest[tensor] != value or value not in self.gradient:
            return
        self._reduce_gradient(tensor, -1, (), self._arrived(value), shares[tensor] == 1, parameter.paths[0])

    def _deposit(self, value: int, slot: int) -> None:
        """A reader's gradient arrives; a second one is added to the first, in place if nobody else reads that."""
        known = self.gradient.get(value)
        if known is None:
            self.gradient[value] = slot
            return
        tensor, size = self.flow.values[value].tensor, self.flow.values[value].local.bytes
        self.sharing[self.writer.root(slot)] -= 1
        in_place = self.sharing[self.writer.root(known)] == 1 and self.writer.slots[self.writer.root(known)].bytes > 0
        total = self.writer.slot(tensor, "gradient", size, known if in_place else -1)
        if not in_place:
            self.sharing[self.writer.root(known)] -= 1
            self.sharing[total] += 1
        self.lies[total] = self.lies[known]
        self.writer.compute(Kind.ACCUMULATE, Phase.BACKWARD, tensor, (known, slot), (total,))
        self.gradient[value] = total
