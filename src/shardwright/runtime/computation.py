"""What instructions that compute do: an operator's piece forward, and the gradients of its inputs and weights.

Operators that call alike (the same operator on pieces that look the same) share what was found out about their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.lowering.calls import local_call
from shardwright.lowering.derivatives import Lazy, derivative
from shardwright.lowering.randomness import random_state, set_random_state
from shardwright.operators.record import draws
from shardwright.program import Instruction, Kind, Phase, Program
from shardwright.program.dataflow import Compute, LayoutChange
from shardwright.program.nodes import kept_outputs, wanted
from shardwright.runtime.actions import Action, Backward, Forward, PassState, Plain
from shardwright.runtime.rank import Rank


class Computation:
    """Makes the actions of the operators of a program."""

    def __init__(self, program: Program, rank: Rank) -> None:
        self.program, self.flow, self.rank = program, program.flow, rank
        self._derivatives: dict[Any, Lazy] = {}
        self._calls: dict[int, Callable[..., tuple[Any, ...]]] = {}
        self._again = {n.result for n in self.flow.nodes if isinstance(n, LayoutChange) and n.again}
        """Gathered parameters that are freed after their forward use and gathered again."""

    def settle(self) -> None:
        """Trace what has not been traced."""
        for found in self._derivatives.values():
            found.settle()

    def _node(self, instruction: Instruction) -> Compute:
        node = self.flow.nodes[instruction.node]
        assert isinstance(node, Compute)
        return node

    def _derivative(self, node: Compute) -> Lazy:
        """How a node is run forward and backward; nodes that call alike share it."""
        like = tuple(self.flow.values[v].local for v in node.inputs)
        returning = tuple(i for i, v in enumerate(node.inputs) if self.flow.roots_of[v] in self._again)
        arriving = tuple(i for i, o in enumerate(node.outputs) if o is not None and o in self.program.gradients)
        place = node.split if draws(node.local, node.rules.kind) else None  # equal pieces elsewhere draw other numbers
        key = (node.call, like, returning, arriving, tuple(sorted(node.lines.items())), place)
        if key not in self._derivatives:
            call = local_call(node, self.flow, self.rank.line, self.rank.device)
            self._derivatives[key] = derivative(node, call, like, arriving, returning, self.rank.device)
        return self._derivatives[key]

    def forward(self, instruction: Instruction, keep: bool) -> Action:
        node, reads = self._node(instruction), instruction.reads
        saved = self.program.saved.get(instruction.node)
        writes_saved = saved is not None and saved in instruction.writes
        outputs = instruction.writes[:-1] if writes_saved else instruction.writes
        places = tuple(i for i, o in enumerate(node.outputs) if o is not None)
        pairs = tuple(zip(outputs, places, strict=True))
        act: Action
        if keep and saved is not None and writes_saved:
            found = self._derivative(node)
            act = Forward(found, reads, pairs, saved, self._views_to_return(node))
        else:
            if instruction.node not in self._calls:
                self._calls[instruction.node] = local_call(node, self.flow, self.rank.line, self.rank.device)
            same = node.kernel is None and not draws(node.local, node.rules.kind) and not self._exchanges(node)
            like = (node.call, tuple(self.flow.values[v].local for v in node.inputs)) if same else None
            act = Plain(self._calls[instruction.node], like, reads, pairs)
        if instruction.node not in self.program.again or not draws(node.local, node.rules.kind):
            return act
        return self._drawing(instruction, act)

    def _drawing(self, instruction: Instruction, act: Action) -> Action:
        """A random operator of a block that is computed again draws the same numbers there."""
        number, device = instruction.node, self.rank.device

        def first(run: PassState) -> None:
            run.random[number] = random_state(device)
            act(run)

        def again(run: PassState) -> None:
            now = random_state(device)
            set_random_state(run.random.pop(number), device)
            try:
                act(run)
            finally:
                set_random_state(now, device)

        return again if instruction.phase is Phase.RECOMPUTE else first

    def gradients(self, instruction: Instruction) -> Action:
        node, program = self._node(instruction), self.program
        given = [program.gradients.get(o) if o is not None else None for o in node.outputs]
        there = set(instruction.reads)
        arrived = tuple(g if g in there else None for g in given)
        count = sum(g is not None for g in arrived)
        saved = program.saved.get(instruction.node)
        kept = instruction.reads[count : len(instruction.reads) - (saved is not None)]
        known = tuple(dict.fromkeys((*(node.inputs[i] for i in node.footprint.saved_inputs), *kept_outputs(node))))
        where = dict(zip(known, kept, strict=True))
        inputs = tuple(where.get(v) for v in node.inputs)
        results = tuple(None if o is None else where.get(o) for o in node.outputs)
        values, weights = wanted(self.flow, node)
        chosen = weights if instruction.kind is Kind.WEIGHT else values
        last = instruction.kind is not Kind.INPUT
        pairs = self._written(instruction, chosen)
        places = tuple(node.inputs.index(v) for v, _ in pairs)
        writes = tuple(slot for _, slot in pairs)
        found = self._derivative(node)
        views = tuple(p for p in self._views_to_return(node) if inputs[p] is not None and saved is not None)
        trained, held = self._trained(chosen), self.rank.held

        def idle() -> bool:
            return bool(trained) and not any(held(t).requires_grad for t in trained)

        return Backward(found, arrived, (*inputs, *results), saved, places, writes, views, last, idle)

    def _exchanges(self, node: Compute) -> bool:
        return any(node.rules.by_name[loop].exchanges for loop in node.lines)

    def _views_to_return(self, node: Compute) -> tuple[int, ...]:
        """The inputs that are views of parameters which are freed after their use and gathered again."""
        roots = self.flow.roots_of
        return tuple(i for i, v in enumerate(node.inputs) if roots[v] in self._again and roots[v] != v)

    def _trained(self, chosen: Sequence[int]) -> tuple[str, ...]:
        """The parameters whose gradients an instruction computes, if it computes nothing else."""
        tensors = tuple(self.flow.values[v].tensor for v in chosen)
        return tensors if all(t in self.flow.graph.parameter_of for t in tensors) else ()

    def _written(self, instruction: Instruction, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Values and the slots that their gradients are written to; some have no gradient."""
        slots = iter(instruction.writes)
        found, slot = [], next(slots, None)
        for value in chosen:
            if slot is not None and self.program.slots[slot].tensor == self.flow.values[value].tensor:
                found.append((value, slot))
                slot = next(slots, None)
        assert slot is None, "a gradient without a value"
        return found
