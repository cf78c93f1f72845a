"""The instructions of a backward pass that have nothing to do when a step goes back from the loss.

A gradient may come back from every result, so the program has what leads on from each of them: with a loss and its logits
for results, a sum of the loss's gradient and one that somebody may bring for the logits. Where nobody brings one, what hangs
on it alone is passed over: it takes no time, makes nothing and communicates nothing, and a sum hands on the gradient that
there is. Prices and memory are those of such a step. A stage is also gone back through from what other stages read of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.program.dataflow import Dataflow
from shardwright.program.instructions import Instruction, Kind, Phase, Slot

COMPUTED = (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT)


def started_from(flow: Dataflow) -> tuple[int, ...]:
    """The results that a step goes back from: what other stages read, and the first scalar; all, where there is neither."""
    tensors = [flow.values[root].tensor for root in flow.roots]
    sent = [root for root, tensor in zip(flow.roots, tensors, strict=True) if tensor in flow.sent]
    own = [root for root, tensor in zip(flow.roots, tensors, strict=True) if tensor not in flow.sent]
    scalars = [root for root in own if not flow.graph.tensors[flow.values[root].tensor].shape]
    return (*sent, *scalars[:1]) or flow.roots


def idle(instructions: Sequence[Instruction], slots: Sequence[Slot], arriving: Sequence[int]) -> frozenset[int]:
    """The numbers of those instructions when gradients arrive in these slots alone."""
    there, found = set(arriving), set[int]()
    passed: set[int] = set()  # nodes
    for number, one in enumerate(instructions):
        if one.phase is not Phase.BACKWARD:
            continue
        if one.kind in COMPUTED or (one.kind is Kind.CHANGE and _gradient(slots, one.reads)):
            if not there.isdisjoint(_gradient(slots, one.reads)):
                there.update(one.writes)
                passed.discard(one.node)
                continue
            passed.add(one.node)
        elif one.kind is Kind.ACCUMULATE:
            known = [slot for slot in one.reads if slot in there]
            there.update(one.writes if known else ())
            if len(known) == len(one.reads):
                continue
        elif one.kind is Kind.EXCHANGE:
            if one.node not in passed:
                continue
        elif not (one.kind is Kind.AWAIT and not one.writes and found.intersection(one.after)):
            there.update(one.writes)
            continue
        found.add(number)
    return frozenset(found)


def _gradient(slots: Sequence[Slot], reads: Sequence[int]) -> list[int]:
    return [slot for slot in reads if slots[slot].role == "gradient"]
