"""Where a general graph is cut into stages: at its ideals, sets of pieces that hold whatever their pieces depend on.

The operators of a micro-batch, in their order, are gathered into *pieces* that are never cut apart: parts of one operator of
the model and the users of a buffer that changes stay together; then, while there are too many, the lightest piece joins the
neighbour to which more bytes go. What depends on no parameter (masks, positions) is computed wherever it is read and so
binds nothing. A stage is the difference of two ideals, one inside the other; it receives what was made before it and it
reads, and sends, once, what it makes and others read. What passes it by costs it nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.errors import ProblemError
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, span_of
from shardwright.program.mean_losses import origin
from shardwright.search.joint.problem import Floats, Ints
from shardwright.search.place._ideals import list_ideals

MOST_PIECES = 48
"""Pieces of a graph at most: more would make stages hardly more even, and every one adds to the pairs that are timed."""
MOST_IDEALS = 80
"""Ideals of a graph at most: searching them takes as long as cutting a chain of so many blocks, which is Llama 70B's.
Where there are more, those of the operators' own order."""


def light(graph: Graph) -> list[bool]:
    """Of every operator, whether it depends on no parameter."""
    known, found = set(graph.sources) - {p.tensor for p in graph.parameters}, []
    for op in graph.ops:
        found.append(all(name in known for name in op.inputs))
        known.update(out for out in op.outputs if out is not None and found[-1])
    return found


def crossing(graph: Graph) -> Floats:
    """Bytes of what is made before and read after every place between two operators, but for what depends on no
    parameter."""
    made: dict[str, int] = {}
    change = np.zeros(len(graph.ops) + 2)
    last: dict[str, int] = {}
    for i, (op, free) in enumerate(zip(graph.ops, light(graph), strict=True)):
        last |= dict.fromkeys(op.inputs, i)
        if not free:
            made |= {out: i for out in op.outputs if out is not None}
    for name, i in made.items():
        if name in last:
            change[i + 1] += graph.tensors[name].bytes
            change[last[name] + 1] -= graph.tensors[name].bytes
    return np.cumsum(change)[: len(graph.ops) + 1]


def may_begin(graph: Graph) -> np.ndarray:
    """Where a stage may begin, by place between two operators: not between the parts of one operator of the model, between
    the users of a buffer that changes, nor between a sort of rows and what brings them back."""
    allowed = np.ones(len(graph.ops) + 1, dtype=bool)
    together: dict[str, list[int]] = {}
    changed = {name: buffer for buffer, new in graph.mutations for name in (buffer, new)}
    for i, op in enumerate(graph.ops):
        together.setdefault(f"operator {origin(op.name)}", []).append(i)
        for name in (*op.inputs, *op.outputs):
            if name in changed:
                together.setdefault(f"buffer {changed[name]}", []).append(i)
            if name is not None and (order := graph.tensors[name].order) is not None:
                together.setdefault(f"sort {order.sort}", []).append(i)
    for places in together.values():
        allowed[places[0] + 1 : places[-1] + 1] = False
    return allowed


def ideals_of(count: int, edges: Ints, most: int) -> np.ndarray | None:
    """All ideals of a partial order on topologically numbered nodes, [ideals, nodes], the smallest first; nothing where
    there are more than ``most``.

    >>> ideals_of(3, np.array([[0, 2], [1, 2]]), 10).astype(int).tolist()
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    needs = np.zeros((count, count // 64 + 1), dtype=np.uint64)
    for a, b in edges:
        needs[b, a >> 6] |= np.uint64(1) << np.uint64(a & 63)
    zero = np.zeros((1, 1), dtype=np.int64)
    bits, _, visited = list_ideals(needs, np.zeros((count, 1), dtype=np.int64), zero, zero, most)
    if visited < 0:
        return None
    found = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :count].astype(bool)
    return found[np.argsort(found.sum(axis=1), kind="stable")]


def nested(ideals: np.ndarray) -> np.ndarray:
    """[a, b]: whether ideal a lies inside b and is smaller."""
    outside = (ideals[:, None, :] & ~ideals[None, :, :]).any(axis=2)
    return ~outside & (ideals.sum(axis=1)[:, None] < ideals.sum(axis=1)[None, :])


@dataclass(frozen=True, eq=False)
class Ideals:
    """The ideals of a graph's pieces, numbered so that what lies inside another comes before it.

    ``pieces``: the number of every operator's piece, in the graph's order; ``inside`` [ideals, pieces]; ``work``: seconds of
    every ideal.
    """

    graph: Graph
    pieces: Ints
    inside: np.ndarray
    work: Floats
    halves = False
    """A group of devices has one stage: there need be no ideal halfway."""
    between = "ideals"

    @staticmethod
    def of(graph: Graph, work: Mapping[str, float], most_pieces: int = MOST_PIECES) -> Ideals:
        """The ideals of a graph whose operators take so many seconds.

        Raises
        ------
        ProblemError
            When nothing in it depends on a parameter, or nothing can be cut apart.
        """
        pieces = _pieces(graph, work, most_pieces)
        count = int(pieces.max(initial=-1)) + 1
        if count < 2:
            raise ProblemError("the model has no two operators that can be cut apart.", "Plan it on one mesh.")
        edges = {(a, b) for _, a, readers in _passed_on(graph, pieces) for b in readers if a != b}
        found = ideals_of(count, np.array(sorted(edges), dtype=np.int64).reshape(-1, 2), MOST_IDEALS)
        if found is None:
            found = np.tri(count + 1, count, -1, dtype=bool)
        seconds = np.zeros(count)
        for op, piece in zip(graph.ops, pieces, strict=True):
            seconds[piece] += work.get(op.name, 0.0)
        # By size, then by work: those next to each other in size and work are likely to be exchanged for each other.
        found = found[np.lexsort((found @ seconds, found.sum(axis=1)))]
        return Ideals(graph, pieces, found, found @ seconds)

    @property
    def count(self) -> int:
        return len(self.inside)

    @cached_property
    def nested(self) -> np.ndarray:
        """[a, b]: whether a stage leads from ideal a to b."""
        return nested(self.inside)

    def next_to(self, cut: int, by: int) -> tuple[int, ...]:
        """The ideals with one piece less (``by`` -1) or more (1) than one."""
        return self._steps[by > 0][cut]

    @cached_property
    def _steps(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        sizes = self.inside.sum(axis=1)
        step = self.nested & (sizes[None, :] == sizes[:, None] + 1)
        before, after = ([tuple(map(int, np.flatnonzero(row))) for row in rows] for rows in (step.T, step))
        return before, after

    def kinds(self, start: np.ndarray, end: np.ndarray, both_ends: bool = False) -> np.ndarray:
        """What prices of stages between ideals depend on, as columns: both of them."""
        assert not both_ends
        return np.stack([start, end])

    def borders(self, kinds: np.ndarray) -> tuple[Floats, Floats]:
        """Bytes of a micro-batch that stages receive, and that they send."""
        start, end = kinds
        received, sent = self.crossing
        return received[start, end], sent[start, end]

    def number(self, cut: int) -> int:
        return cut

    def cut_at(self, number: int) -> int:
        return number

    @cached_property
    def members(self) -> np.ndarray:
        """[ideals, operators]: what is computed by then."""
        return self.inside[:, self.pieces]

    def operators(self, start: int, end: int) -> tuple[str, ...]:
        """Operators of the stage between two ideals."""
        mine = self.members[end] & ~self.members[start]
        return tuple(op.name for op, own in zip(self.graph.ops, mine, strict=True) if own)

    @cached_property
    def crossing(self) -> tuple[Floats, Floats]:
        """[start, end]: bytes of a micro-batch that a stage receives, and that it sends."""
        inside, outside = self.inside, ~self.inside
        received, sent = np.zeros((2, self.count, self.count))
        for size, maker, readers in _passed_on(self.graph, self.pieces):
            if readers == [maker]:
                continue
            made = inside[:, maker]
            mine = (inside[None, :, readers] & outside[:, None, readers]).any(axis=2)  # [start, end]
            later = np.atleast_1d(outside[:, readers].any(axis=1))
            received += size * (made[:, None] & mine)
            sent += size * (~made[:, None] & made[None, :] & later[None, :])
        return received, sent

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Blocks that may recompute."""
        return block_paths(self.graph) if self.graph.training else ()

    @cached_property
    def blocks(self) -> Ints:
        """[start, end]: of how many blocks that may recompute a stage has operators."""
        found = np.zeros((self.count, self.count), dtype=np.int64)
        for path in self.paths:
            own = sorted({int(self.pieces[i]) for i in span_of(self.graph, path)})
            found += (self.inside[None, :, own] & ~self.inside[:, None, own]).any(axis=2)
        return found

    def even(self, stages: int) -> list[int] | None:
        """A chain of ideals between which there is about equal work; nothing where there is none."""
        cuts = [0]
        for number in range(1, stages):
            after = np.flatnonzero(self.nested[cuts[-1]] & self.nested[:, -1])
            if not len(after):
                return None
            wanted = self.work[-1] * number / stages
            cuts.append(int(after[np.argmin(np.abs(self.work[after] - wanted))]))
        return [*cuts, self.count - 1]


def _pieces(graph: Graph, work: Mapping[str, float], most: int) -> Ints:
    """The number of every operator's piece."""
    free, allowed, bytes_at = light(graph), may_begin(graph), crossing(graph)
    heavy = [i for i, is_free in enumerate(free) if not is_free]
    begins = [heavy[0]] if heavy else []  # of every piece, its first operator
    begins += [b for a, b in itertools.pairwise(heavy) if allowed[a + 1 : b + 1].any()]
    seconds = [
        sum(work.get(op.name, 0.0) for op in graph.ops[a:b]) for a, b in itertools.pairwise([*begins, len(graph.ops)])
    ]
    while len(begins) > most:
        lightest = int(np.argmin(seconds))
        neighbours = [k for k in (lightest - 1, lightest + 1) if 0 <= k < len(begins)]
        other = max(neighbours, key=lambda k: (bytes_at[begins[max(k, lightest)]], -seconds[k]))
        joined = max(other, lightest)
        seconds[joined - 1] += seconds.pop(joined)
        begins.pop(joined)
    place = _places(graph)
    found = np.searchsorted(begins, np.arange(len(graph.ops)), side="right") - 1
    for i in range(len(graph.ops) - 1, -1, -1):  # what is light goes with the first that reads it
        if free[i]:
            readers = (op for out in graph.ops[i].outputs if out is not None for op in graph.consumers[out])
            found[i] = min((found[place[op.name]] for op in readers), default=len(begins) - 1)
    return found.astype(np.int64)


def _places(graph: Graph) -> dict[str, int]:
    return {op.name: i for i, op in enumerate(graph.ops)}


def _passed_on(graph: Graph, pieces: Sequence[int] | Ints) -> list[tuple[float, int, list[int]]]:
    """Of every tensor that depends on a parameter and is read: its bytes, the piece that makes it, those that read it."""
    free, place = light(graph), _places(graph)
    found = []
    for op, is_free in zip(graph.ops, free, strict=True):
        for out in (out for out in op.outputs if out is not None and not is_free):
            readers = sorted({int(pieces[place[reader.name]]) for reader in graph.consumers[out]})
            if readers:
                found.append((float(graph.tensors[out].bytes), int(pieces[place[op.name]]), readers))
    return found
