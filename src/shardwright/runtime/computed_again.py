"""What a compiled region keeps for passes back: the fewest bytes that the rest can be computed again from.

Every operator of a region says by itself what its backward reads: a norm in bfloat16 keeps its input in float32, a softmax
its result, a loss all logits in float32. Compiled, such values cost nothing: they are made in registers of what is there
anyway. So of all that crosses to passes back, the region keeps a cut through its own operators, the least by bytes, and the
regions that read the rest begin with computing it (Chen et al., 2016; a least cut for it: Checkmate's question without its
costs, and what ``torch.compile`` does between forward and backward). As there, only operators that are fused into others are
performed twice, never a product or a random draw, nor what shrinks its input to a quarter; what a product reads is kept, for
it would have to be written down again. What outlives the forward pass anyway costs nothing. What is freed before
passes back (gathered parameters), or what communication may write over, is no part of a cut.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwright._torch_compat import computes_cheaply, is_view_operator, storage_of

SHRINKS = 4
"""An operator whose result has fewer bytes than its inputs by this factor is not performed again."""
DEAR = 16
"""Where bytes are nearly the same, what is in memory anyway is kept, and not what would have to be written there first."""
_NEVER = 1 << 62


class Recipe:
    """How the values that one region does not keep are made of those that it keeps."""

    def __init__(self, module: fx.GraphModule, saved: Sequence[fx.Node], wanted: Iterable[fx.Node]) -> None:
        self.saved = tuple(saved)
        place = {node: number for number, node in enumerate(saved)}
        self.needs: dict[fx.Node, tuple[int, ...]] = {}
        """By value, the places of what it is made of."""
        self._module, self._steps = module, dict[fx.Node, list[fx.Node]]()
        order = {node: number for number, node in enumerate(module.graph.nodes)}
        for node in wanted:
            inside, ends, left = set[fx.Node](), set[int](), [node]
            while left:
                one = left.pop()
                if one in place:
                    ends.add(place[one])
                elif one not in inside:
                    inside.add(one)
                    left += one.all_input_nodes
            self.needs[node], self._steps[node] = tuple(sorted(ends)), sorted(inside, key=order.__getitem__)

    def made(self, node: fx.Node, given: Sequence[Tensor], known: dict[fx.Node, Any]) -> Tensor:
        """A value, from what it needs; what others made on the way is taken from ``known``."""
        known.update((self.saved[place], x) for place, x in zip(self.needs[node], given, strict=True))
        for one in self._steps[node]:
            if one in known:
                continue
            if one.op == "get_attr":
                known[one] = getattr(self._module, str(one.target))
            else:
                call: Any = one.target
                known[one] = call(*fx.map_arg(one.args, known.get), **fx.map_arg(one.kwargs, known.get))
        return known[node]


@dataclass(frozen=True, eq=False, slots=True)
class Again:
    """Stands for a tensor that whoever reads it computes from these. ``call``: the values of one call of a region are made
    together."""

    recipe: Recipe
    node: fx.Node
    call: object
    given: tuple[Tensor, ...]


Values = dict[object, dict[fx.Node, Any]]
"""What calls of regions have made again so far."""


def settled(value: Any, known: Values) -> Any:
    """A value with tensors in place of what stands for them."""
    if isinstance(value, Again):
        return value.recipe.made(value.node, value.given, known.setdefault(value.call, {}))
    if isinstance(value, tuple | list):
        return type(value)(settled(item, known) for item in value)
    return value


def settle(slots: list[Any], which: Iterable[int]) -> None:
    """From now on these hold tensors: what is not compiled reads them."""
    known: Values = {}
    for slot in which:
        slots[slot] = settled(slots[slot], known)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Stands for the next tensor."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands for what is made of tensors at these places, among those of the call of this number."""

    recipe: Recipe
    node: fx.Node
    call: int
    places: tuple[int, ...]


class Leaves:
    """The tensors in what a region reads, each once where values are made of them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._calls: dict[object, int] = {}

    @staticmethod
    def of(value: Any) -> Leaves:
        found = Leaves()
        found.opened(value)
        return found

    @property
    def all(self) -> list[Tensor]:
        """The tensors, then those that others are made of."""
        return [*self.tensors, *self._kept]

    def opened(self, value: Any) -> Hashable:
        """What is the same in values that one function takes: the shapes of tensors, and what else there is (nothing, or a
        way back with what it keeps)."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return value.shape, value.stride(), value.dtype
        if isinstance(value, tuple | list):
            return tuple([self.opened(item) for item in value])
        return self._made(value) if isinstance(value, Again) else value

    def template(self, value: Any) -> Any:
        """The value with marks in place of its tensors."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _Leaf()
        if isinstance(value, tuple | list):
            return type(value)(self.template(item) for item in value)
        return self._made(value) if isinstance(value, Again) else value

    def _made(self, value: Again) -> _Made:
        places = []
        for x in value.given:
            place = self._places.setdefault(id(x), len(self._kept))
            if place == len(self._kept):
                self._kept.append(x)
            places.append(place)
        return _Made(value.recipe, value.node, self._calls.setdefault(value.call, len(self._calls)), tuple(places))


class Arrived:
    """Tensors that take the places of marks: one after the other, and from ``first`` on those that others are made of."""

    def __init__(self, tensors: Sequence[Tensor], first: int) -> None:
        self.next, self.kept = iter(tensors), tensors[first:]
        self.known: Values = {}


def closed(template: Any, arrived: Arrived, call: object = None) -> Any:
    """The value again, with these tensors; ``call`` is that which has made them."""
    if isinstance(template, _Leaf):
        return next(arrived.next)
    if isinstance(template, _Made):
        given = tuple(arrived.kept[place] for place in template.places)
        return Again(template.recipe, template.node, template.call if call is None else call, given)
    if isinstance(template, tuple | list):
        return type(template)(closed(item, arrived, call) for item in template)
    return template


class Crossing(NamedTuple):
    """What becomes of a forward region's values. ``back``: the results that only passes back read; ``measured``: those of
    which they only ask how large they are; ``standing``: those that outlive the forward pass anyway; ``costs``: what keeping
    each of its inputs costs, in times its bytes, ``None`` where it cannot be kept."""

    back: tuple[bool, ...]
    measured: tuple[bool, ...]
    standing: tuple[bool, ...]
    costs: tuple[int | None, ...]

    def cut(
        self, traced: fx.GraphModule, results: Sequence[Any], sizes: Sequence[Sequence[int]]
    ) -> tuple[fx.GraphModule, list[Any], int]:
        """A region that gives less: its operators, its results with marks for what is made again, and how many tensors these
        are made of, which it gives last. ``sizes``: the bytes of the tensors in every input."""
        counts = [_count(template) for template in results]
        back = [only for only, count in zip(self.back, counts, strict=True) for _ in range(count)]
        measured = [only for only, count in zip(self.measured, counts, strict=True) for _ in range(count)]
        standing = [stays for stays, count in zip(self.standing, counts, strict=True) for _ in range(count)]
        _apart(traced, back, [a and b for a, b in zip(back, measured, strict=True)])
        costs = zip(self.costs, sizes, strict=True)
        givens = [None if times is None else times * size for times, own in costs for size in own]
        saved, again = least(traced, back, standing, givens)
        if not again:
            return traced, list(results), 0
        recipe, graph, copies = Recipe(traced, saved, again.values()), fx.Graph(), dict[fx.Node, fx.Node]()
        made: Any = graph.graph_copy(traced.graph, copies)
        kept = [node for place, node in enumerate(made) if place not in again]
        graph.output((*kept, *(copies[node] for node in saved)))
        graph.eliminate_dead_code()
        places = iter(range(len(back)))

        def marked(template: Any) -> Any:
            if isinstance(template, _Leaf):
                node = again.get(next(places))
                return template if node is None else _Made(recipe, node, 0, recipe.needs[node])
            return type(template)(map(marked, template)) if isinstance(template, tuple | list) else template

        return fx.GraphModule(traced, graph), [marked(template) for template in results], len(saved)


def _apart(traced: fx.GraphModule, back: Sequence[bool], measured: Sequence[bool]) -> None:
    """Results for passes back that lie in something larger may be copied out of it (values beside queries and keys): the
    least cut decides whether they are. In place of those that are only ``measured`` stand zeros of that size, which take no
    memory."""
    output = list(traced.graph.nodes)[-1]
    instead: list[Any] = list(output.args[0])
    copies: dict[fx.Node, fx.Node] = {}
    for place, (node, only_back, sized) in enumerate(zip(output.args[0], back, measured, strict=True)):
        if not only_back or not isinstance(node, fx.Node):
            continue
        val = node.meta["val"]
        with traced.graph.inserting_before(output), val.fake_mode:
            if sized:
                kind = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
                zero = traced.graph.call_function(torch.ops.aten.full.default, ([], 0), kind)
                zero.meta["val"] = torch.zeros((), dtype=val.dtype, device=val.device)
                instead[place] = traced.graph.call_function(torch.ops.aten.expand.default, (zero, list(val.shape)))
                instead[place].meta["val"] = zero.meta["val"].expand(val.shape)
            elif node.op == "call_function" and val.untyped_storage().nbytes() > _bytes(node):
                if node not in copies:
                    copies[node] = traced.graph.call_function(torch.ops.aten.clone.default, (node,))
                    copies[node].meta = {**node.meta, "val": val.clone()}
                instead[place] = copies[node]
    output.args = (tuple(instead),)
    traced.recompile()


def _count(template: Any) -> int:
    if isinstance(template, _Leaf):
        return 1
    return sum(map(_count, template)) if isinstance(template, tuple | list) else 0


def least(
    module: fx.GraphModule, needed: Sequence[bool], standing: Sequence[bool], givens: Sequence[int | None]
) -> tuple[list[fx.Node], dict[int, fx.Node]]:
    """What to keep, and which results are made of it, by their places. ``needed``: the results that only passes back read;
    ``standing``: those that outlive the forward pass anyway. ``givens``: for every input its bytes, 0 where it is there
    anyway, or ``None`` where it cannot be kept."""
    nodes = list(module.graph.nodes)
    results = list(nodes[-1].args[0])
    free, barred = set[int](), set[int]()
    places = [node for node in nodes if node.op == "placeholder"]
    for node, size in zip(places, givens, strict=True):
        if not size:
            (barred if size is None else free).add(storage_of(node.meta["val"]))
    for node, only_back, stays in zip(results, needed, standing, strict=True):
        if not only_back and isinstance(node, fx.Node):
            (free if stays else barred).add(storage_of(node.meta["val"]))
    barred -= free
    wanted = {
        place: node
        for place, (node, only_back) in enumerate(zip(results, needed, strict=True))
        if only_back and isinstance(node, fx.Node) and storage_of(node.meta["val"]) not in barred | free
    }
    known_costs = dict(zip(places, givens, strict=True))

    def cost(node: fx.Node) -> int:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or storage_of(val) in barred:
            return _NEVER
        if storage_of(val) in free:
            return 0
        size = known_costs.get(node) or val.untyped_storage().nbytes()
        return size + size // DEAR if node.op == "call_function" and _fused(node) else size

    kept = _by_products(nodes, set(wanted.values()))
    first = [node for node in nodes if node in kept or not _again(node)]
    saved = _cut(nodes, {node: cost(node) for node in nodes}, first, set(wanted.values()))
    return saved, {place: node for place, node in wanted.items() if node not in set(saved)}


def _again(node: fx.Node) -> bool:
    """Whether an operator may be performed a second time."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or is_view_operator(node.target):
        return True
    return computes_cheaply(node.target) and SHRINKS * _bytes(node) >= sum(map(_bytes, node.all_input_nodes))


def _bytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    return val.numel() * val.element_size() if isinstance(val, Tensor) else 0


def _by_products(nodes: Sequence[fx.Node], wanted: set[fx.Node]) -> set[fx.Node]:
    """Values that what cannot be fused reads, here and so in passes back."""
    found: set[fx.Node] = set()
    seen: dict[fx.Node, tuple[bool, bool]] = {}
    for node in reversed(nodes):
        views = [user for user in node.users if is_view_operator(user.target)]
        product = any(user.op == "call_function" and not _fused(user) for user in node.users)
        asked = node in wanted
        for user in views:
            product, asked = product or seen[user][0], asked or seen[user][1]
        seen[node] = product, asked
        if product and asked and node.op == "call_function" and not is_view_operator(node.target):
            found.add(node)
    return found


def _fused(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_view_operator(node.target) or computes_cheaply(node.target)


def _cut(
    nodes: Sequence[fx.Node], costs: Mapping[fx.Node, int], first: Iterable[fx.Node], last: Iterable[fx.Node]
) -> list[fx.Node]:
    """The cheapest values without which nothing of ``last`` can be made, where those of ``first`` are made only once: the
    largest flow from these to those (Ford and Fulkerson, 1956), by shortest ways. Of several cuts, that nearest to ``last``
    is taken, so that the least is computed again."""
    flow = _Flow(2 * len(nodes) + 2)
    number = {node: n for n, node in enumerate(nodes)}
    begin, end = 2 * len(nodes), 2 * len(nodes) + 1
    for node, n in number.items():
        flow.pipe(2 * n, 2 * n + 1, costs[node])
        for user in node.users:
            flow.pipe(2 * n + 1, 2 * number[user], _NEVER)
    for node in first:
        flow.pipe(begin, 2 * number[node], _NEVER)
    for node in last:
        flow.pipe(2 * number[node] + 1, end, _NEVER)
    flow.fill(begin, end)
    behind = flow.reaching(end)
    return [node for node, n in number.items() if 2 * n + 1 in behind and 2 * n not in behind]


class _Flow:
    """Pipes between points, and what still passes through each of them both ways."""

    def __init__(self, points: int) -> None:
        self._left: list[dict[int, int]] = [{} for _ in range(points)]

    def pipe(self, one: int, other: int, room: int) -> None:
        self._left[one][other] = self._left[one].get(other, 0) + room
        self._left[other].setdefault(one, 0)

    def fill(self, begin: int, end: int) -> None:
        """Let through as much as goes."""
        while (came := self._walked(begin, lambda one, other: self._left[one][other] > 0, end)).get(end) is not None:
            way, point = [], end
            while point != begin:
                way.append((came[point], point))
                point = came[point]
            much = min(self._left[one][other] for one, other in way)
            for one, other in way:
                self._left[one][other] -= much
                self._left[other][one] += much

    def reaching(self, end: int) -> set[int]:
        """The points from which something could still get there."""
        return {end, *self._walked(end, lambda one, other: self._left[other][one] > 0)}

    def _walked(self, begin: int, passable: Callable[[int, int], bool], end: int = -1) -> dict[int, int]:
        """By every point that can be reached, where one comes from."""
        came, waiting = {begin: -1}, deque([begin])
        while waiting and end not in came:
            one = waiting.popleft()
            for other in self._left[one]:
                if other not in came and passable(one, other):
                    came[other] = one
                    waiting.append(other)
        return came
