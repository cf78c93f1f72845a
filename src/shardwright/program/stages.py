"""The graph of a micro-batch cut into the graphs of stages.

A stage is any set of operators, numbered so that values flow from lower to higher numbers. What one stage makes and another
reads crosses a border: it is an output of the one graph and an input of the other, sent straight to every stage that reads
it, once, however far that is. Parameters, inputs and constants go wherever they are read; a parameter that several stages
read is held by each of them, its gradients are summed between them. Small operators that depend on inputs and constants
alone (masks, positions) are computed again by every stage that reads them rather than sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.errors import LoweringError
from shardwright.graph import Graph, Input, Op, Ref
from shardwright.program.mean_losses import origin


@dataclass(frozen=True)
class StageGraph:
    """The operators of one stage. ``received`` maps tensors of other stages to the stage that makes them, ``sent`` its own
    tensors to the stages that read them; ``results`` pairs outputs of the model with tensors that this stage hands out."""

    graph: Graph
    received: Mapping[str, int]
    sent: Mapping[str, tuple[int, ...]]
    results: tuple[tuple[int, str], ...]

    @property
    def wanted(self) -> tuple[str, ...]:
        """What it receives and sends a gradient back for."""
        return tuple(name for name in self.received if self.graph.tensors[name].grad)


def stage_graphs(graph: Graph, stages: Sequence[Sequence[str]]) -> tuple[StageGraph, ...]:
    """Cut a graph by the names of the operators of every stage; parts of an operator go where it goes.

    Example
    -------
    >>> [s.sent for s in stage_graphs(graph, [first, second])]                                   # doctest: +SKIP
    """
    results = tuple((place, out.name) for place, out in enumerate(graph.outputs) if isinstance(out, Ref))
    if len(stages) == 1:
        return (StageGraph(graph, {}, {}, results),)
    stage_of = {name: number for number, names in enumerate(stages) for name in names}
    of_op = {op.name: stage_of[origin(op.name)] for op in graph.ops}
    light = _light(graph)
    members: list[list[Op]] = []
    for number in range(len(stages)):
        own = {op.name for op in graph.ops if of_op[op.name] == number and op.name not in light}
        members.append(_with_light(graph, own, light, number, of_op))
    made = [{name for op in ops for name in op.outputs if name} for ops in members]
    home: dict[str, int] = {}
    for number, names in enumerate(made):
        for name in names:
            home.setdefault(name, number)
    read = [{name for op in ops for name in op.inputs} for ops in members]
    sources, parts = set(graph.sources), []
    for number, ops in enumerate(members):
        received = {n: home[n] for op in ops for n in op.inputs if n not in made[number] and n not in sources}
        sent: dict[str, tuple[int, ...]] = {}
        for name in (name for op in ops for name in op.outputs if name):
            readers = tuple(r for r in range(len(stages)) if r != number and name in read[r] and name not in made[r])
            if readers and home[name] == number:
                sent[name] = readers
        out = tuple((place, name) for place, name in results if home.get(name, 0) == number)
        parts.append(StageGraph(_part(graph, ops, received, sent, out, number), received, sent, out))
    for buffer, new in graph.mutations:  # who changes a buffer has it alone: others would read what was there before
        holders = [n for n, part in enumerate(parts) if any(b.tensor == buffer for b in part.graph.buffers)]
        makers = [n for n, part in enumerate(parts) if (buffer, new) in part.graph.mutations]
        if holders != makers:
            raise LoweringError(
                f"The buffer {buffer!r} is read by stages {holders} and changed by stages {makers}.",
                "Cut the model so that one stage has all operators that use this buffer.",
            )
    return tuple(parts)


def _light(graph: Graph) -> frozenset[str]:
    """Operators that depend on inputs, buffers and constants alone."""
    known = set(graph.sources) - {p.tensor for p in graph.parameters}
    found = set()
    for op in graph.ops:
        if all(name in known for name in op.inputs):
            found.add(op.name)
            known.update(name for name in op.outputs if name)
    return frozenset(found)


def _with_light(graph: Graph, own: set[str], light: frozenset[str], number: int, of_op: Mapping[str, int]) -> list[Op]:
    """A stage's operators, with the light ones that they read; the last stage has those that nobody reads."""
    wanted = {name for op in graph.ops if op.name in own for name in op.inputs}
    handed_out = {out.name for out in graph.outputs if isinstance(out, Ref)} | {new for _, new in graph.mutations}
    chosen = set(own)
    for op in reversed(graph.ops):
        if op.name not in light:
            continue
        needed = any(name in wanted for name in op.outputs if name)
        result = any(name in handed_out for name in op.outputs if name) and of_op[op.name] == number
        if needed or result:
            chosen.add(op.name)
            wanted.update(op.inputs)
    return [op for op in graph.ops if op.name in chosen]


def _part(
    graph: Graph,
    ops: Sequence[Op],
    received: Mapping[str, int],
    sent: Mapping[str, tuple[int, ...]],
    results: Sequence[tuple[int, str]],
    number: int,
) -> Graph:
    read = {name for op in ops for name in op.inputs} | {name for _, name in results}
    everywhere = {name for op in graph.ops for name in op.inputs}
    idle = number == 0  # what nobody reads stays with the first stage
    parameters = tuple(p for p in graph.parameters if p.tensor in read or (idle and p.tensor not in everywhere))
    buffers = tuple(b for b in graph.buffers if b.tensor in read or (idle and b.tensor not in everywhere))
    constants = tuple(c for c in graph.constants if c.tensor in read)
    inputs = tuple(i for i in graph.inputs if i.tensor is not None and i.tensor in read)
    inputs += tuple(Input(name, path=name) for name in received)
    changed = tuple((buffer, new) for buffer, new in graph.mutations if any(new in op.outputs for op in ops))
    held = [e.tensor for e in parameters] + [e.tensor for e in buffers] + [e.tensor for e in constants]
    names = {name for name in (*held, *(e.tensor for e in inputs)) if name is not None}
    names |= {name for op in ops for name in op.outputs if name}
    outputs = tuple(Ref(name) for name in dict.fromkeys((*sent, *(name for _, name in results))))
    return replace(
        graph,
        tensors={name: tensor for name, tensor in graph.tensors.items() if name in names},
        ops=tuple(ops),
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        mutations=changed,
        input_tree="",
        output_tree="",
    )
