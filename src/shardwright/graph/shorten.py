"""The same model with fewer layers: a run of repeated blocks cut to its first few.

What a step takes grows by the same amount with every further block of a run, once a few of them are there; so two short
graphs tell what a deep one will take (:mod:`shardwright.planner.glance`). Operators and tensors keep their names, so a
strategy of the deep graph is one of the short graph too. What comes after the run reads from the block that is its last now.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.graph.core import Graph, Op, Ref, Value, refs
from shardwright.graph.repeats import Repeat, remembered, repeated_blocks


def longest_run(graph: Graph) -> Repeat | None:
    """The run of repeated blocks with most operators."""
    return max(repeated_blocks(graph), key=lambda run: run.stop - run.start, default=None)


def shortened(graph: Graph, count: int) -> Graph | None:
    """The graph with its longest run cut to ``count`` blocks; nothing where it has no more, or others read its middle.

    >>> len(shortened(graph, 2).ops) < len(graph.ops)
    True
    """
    return remembered(graph, f"_shortened_{count}", lambda: _shorten(graph, count))


def _shorten(graph: Graph, count: int) -> Graph | None:
    run = longest_run(graph)
    if run is None or run.count <= count:
        return None
    gone = range(run.start + count * run.period, run.stop)
    moved: dict[str, str | None] = {}
    for index in gone:
        stands_in = graph.ops[index - len(gone)] if index - len(gone) >= run.start else None
        for place, out in enumerate(graph.ops[index].outputs):
            if out is not None:
                moved[out] = None if stands_in is None else stands_in.outputs[place]
    after = graph.ops[gone.stop :]
    mutations = tuple((held, new) for held, new in graph.mutations if new not in moved)
    read = {name for op in after for name in op.inputs} | {r.name for r in refs(graph.outputs)}
    if any(name in moved and moved[name] is None for name in read):
        return None
    names = {old: new for old, new in moved.items() if new is not None}
    ops = graph.ops[: gone.start] + tuple(_renamed(op, names) for op in after)
    dropped = {name for op in graph.ops[gone.start : gone.stop] for name in op.inputs}
    dropped -= {name for op in ops for name in op.inputs} | {held for held, _ in mutations}
    sources = set(graph.sources) - dropped
    made = {out for op in ops for out in op.outputs if out is not None}
    return replace(
        graph,
        tensors={name: tensor for name, tensor in graph.tensors.items() if name in made or name in sources},
        ops=ops,
        outputs=_values(graph.outputs, names),
        parameters=tuple(p for p in graph.parameters if p.tensor not in dropped),
        buffers=tuple(b for b in graph.buffers if b.tensor not in dropped),
        constants=tuple(c for c in graph.constants if c.tensor not in dropped),
        mutations=mutations,
    )


def _renamed(op: Op, names: dict[str, str]) -> Op:
    if not any(name in names for name in op.inputs):
        return op
    return replace(op, args=_values(op.args, names), kwargs=tuple((k, _value(v, names)) for k, v in op.kwargs))


def _values(values: tuple[Value, ...], names: dict[str, str]) -> tuple[Value, ...]:
    return tuple(_value(value, names) for value in values)


def _value(value: Value, names: dict[str, str]) -> Value:
    """An argument with its references renamed."""
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    return _values(value, names) if isinstance(value, tuple) else value
