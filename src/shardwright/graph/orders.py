"""Rows that are sorted and brought back: which tensors hold them meanwhile, in an order that is nobody's business.

Mixtures of experts sort the rows of a batch by expert, multiply each group of rows by its expert's weights, and bring the
rows back into their order (grouped products; Hugging Face's experts). What happens to a sorted row depends on that row and
on its key alone. So whoever has some of the rows may sort those by themselves, whatever others do with theirs, and what
comes back is the same row for row. Every tensor between the sort and the way back is marked here with the sort that it hangs
on and with what it holds; how operators on such tensors are cut is said in :mod:`shardwright.operators.own_orders`.

A mark is a necessary condition, not a proof: of operators that are not known here, a result with as many rows is taken for
rows. Whether such an operator goes row by row is for its rules to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.graph.core import Graph, Op, Tensor

KEYS, ROWS, PLACES, INVERSE, COUNTS, ENDS = "keys", "rows", "places", "inverse", "counts", "ends"
POSITIONS = "positions"  # of no use to anybody
SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.clone.default", "aten.contiguous.default")
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
BLANKS = ("aten.empty_like.default", "aten.zeros_like.default")
INDEX, PUT, DIVIDE = "aten.index.Tensor", "aten.index_put.default", "aten.floor_divide.default"
HISTOGRAM, ADDED_UP = "aten.histc.default", "aten.cumsum.default"


@dataclass(frozen=True)
class Order:
    """A tensor that hangs on a sort of rows.

    ``what`` it holds: the sorted ``keys``; ``rows`` in their order; the ``places`` that sorted rows come from (divided by
    ``each``, where several rows belong to one of the batch); the ``inverse``, where each row went; how many rows every key
    has (``counts``), and where its rows end (``ends``). All but the last two have a row in each place of their first dim.
    Rows may be cut between ``units`` of equally many.
    """

    sort: str
    what: str
    each: int = 1
    units: int = 1

    @property
    def by_row(self) -> bool:
        return self.what not in (COUNTS, ENDS)


def marked(graph: Graph) -> Mapping[str, Tensor]:
    """The tensors of a graph, those that hang on a sort of rows marked; those of sorts of which something is handed out are
    not, for that is everybody's business."""
    from shardwright.graph.core import refs

    if not any(op.target in SORTS for op in graph.ops):
        return graph.tensors
    marks: dict[str, Order] = {}
    for op in graph.ops:
        found = _made(op, [marks.get(name) for name in op.inputs], graph)
        marks |= {name: order for name, order in zip(op.outputs, found, strict=False) if name is not None and order}
    handed = [ref.name for ref in refs(graph.outputs)] + [new for _, new in graph.mutations]
    out = {marks[name].sort for name in handed if name in marks}
    marks = {name: order for name, order in marks.items() if order.sort not in out}
    each: dict[str, int] = {}
    rows: dict[str, int] = {}
    for name, order in marks.items():
        each[order.sort] = max(each.get(order.sort, 1), order.each)
        if order.by_row:
            rows[order.sort] = graph.tensors[name].shape[0]
    orders = {name: replace(one, units=rows[one.sort] // each[one.sort]) for name, one in marks.items()}
    return {name: replace(tensor, order=orders.get(name)) for name, tensor in graph.tensors.items()}


def brings_back(given: Sequence[Order | None]) -> bool:
    """Whether an index with these inputs takes every row from where the sort put it."""
    return (
        len(given) == 2
        and given[0] is not None
        and given[1] is not None
        and (given[0].what, given[1].what) == (ROWS, INVERSE)
        and given[0].sort == given[1].sort
    )


def sorts(op: Op) -> bool:
    """Whether it puts rows into an order."""
    return op.target in SORTS


def positions(op: Op) -> int | None:
    """Where an operator that takes or puts by positions has those of the rows, all of them in their order."""
    if op.target == INDEX and len(op.inputs) > 2:
        return 1
    return 2 if op.target == PUT else None


def counts_rows(graph: Graph, name: str, of: str) -> bool:
    """Whether a tensor holds the positions of all rows of another."""
    maker = graph.producer.get(name)
    return maker is not None and maker.target == "aten.arange.default" and maker.args == graph.tensors[of].shape[:1]


def _made(op: Op, given: Sequence[Order | None], graph: Graph) -> Sequence[Order | None]:
    """The marks of an operator's results; fewer, or none, where they hang on no sort."""
    metas = [graph.tensors[name] for name in op.inputs]
    orders = [order for order in given if order is not None]
    if op.target in SORTS:
        return _sorted(op, given, metas)
    if not orders or len({order.sort for order in orders}) > 1:
        return ()
    first, only = given[0], orders[0]
    if op.target == INDEX:
        return _indexed(op, given, metas)
    if op.target == PUT:
        return _inverted(op, given, graph)
    if op.target in CASTS:
        return (first,)
    if first is not None and first.what == PLACES and op.target == DIVIDE and isinstance(op.args[1], int):
        return (replace(first, each=first.each * op.args[1]),)
    if first is not None and first.what == KEYS and op.target == HISTOGRAM and _one_bin_each(op):
        return (replace(first, what=COUNTS),)
    if first is not None and first.what == COUNTS and op.target == ADDED_UP:
        return (replace(first, what=ENDS),)
    if op.target in GROUPED:
        grouped = len(given) == 3 and given[1] is None and [o.what for o in orders] == [ROWS, ENDS]
        return (first,) if grouped else ()
    values = op.target not in BLANKS  # whose places say where rows are among all, which no piece of them knows
    if not all(order.what in (KEYS, ROWS) if values else order.by_row for order in orders):
        return ()
    rows = metas[given.index(only)].shape[0]
    results = [graph.tensors[name] if name is not None else None for name in op.outputs]
    like = replace(only, what=ROWS, each=1)
    return [like if result is not None and result.shape[:1] == (rows,) else None for result in results]


def _sorted(op: Op, given: Sequence[Order | None], metas: Sequence[Tensor]) -> Sequence[Order | None]:
    descending = op.kwarg("descending") or True in op.args[1:]
    if len(metas[0].shape) != 1 or descending:
        return ()
    first, pair = given[0], (Order(op.name, KEYS), Order(op.name, PLACES))
    if first is not None:  # sorting where rows come from says where they went
        if first.what != PLACES or first.each != 1:
            return ()
        pair = replace(first, what=POSITIONS), replace(first, what=INVERSE)
    return pair if len(op.outputs) == 2 else pair[1:]


def _indexed(op: Op, given: Sequence[Order | None], metas: Sequence[Tensor]) -> Sequence[Order | None]:
    from shardwright.graph.core import Ref

    if len(given) != 2 or op.args[1] != (Ref(op.inputs[1]),) or (index := given[1]) is None or given[0] is not None:
        return ()
    own = index.what == PLACES and metas[0].shape[0] * index.each == metas[1].shape[0]
    return (replace(index, what=ROWS, each=1),) if own or index.what == KEYS else ()


def _inverted(op: Op, given: Sequence[Order | None], graph: Graph) -> Sequence[Order | None]:
    """Positions put where their rows came from: every place is written once."""
    if len(given) != 3 or len(op.args) > 3 or op.kwargs or given[2] is not None:
        return ()
    blank, index = given[0], given[1]
    if not counts_rows(graph, op.inputs[2], op.inputs[0]) or blank is None or index is None or not blank.by_row:
        return ()
    return (replace(index, what=INVERSE),) if (index.what, index.each) == (PLACES, 1) else ()


def _one_bin_each(op: Op) -> bool:
    """Whether a histogram counts every key from zero on by itself."""
    given = dict(zip(("self", "bins", "min", "max"), op.args, strict=False)) | dict(op.kwargs)
    bins = given.get("bins", 100)
    return isinstance(bins, int) and (given.get("min", 0), given.get("max", 0)) == (0, bins - 1)
