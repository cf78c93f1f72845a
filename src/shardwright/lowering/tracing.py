"""One operator and its backward, written down as plain functions of tensors.

``torch.fx``'s tracer runs the operator and autograd once on tensors without data and notes every operator that is called
(Reed et al., 2022; the way of AOTAutograd, one operator at a time). What depends on the gradients that arrive is the
backward part, and so is what no result needs and can be made of what is kept anyway (twice the base of a square); the rest
is the forward part, and the values that cross over are what has to be kept. Views of inputs are made again instead. Where
nothing but inputs and results crosses, the forward part is the operator itself. Operators that cannot be traced so (they
look at data, or write in place) are left to autograd.

Random numbers and statistics that ranks exchange (the number of labels under a mean loss) belong to neither part: what leads
to them is the *early* part, which reads few inputs or none and can be done before the operator's turn.

A trace holds for the strides it was made with: PyTorch's formulas call ``contiguous()``, which leaves no trace where a
tensor is contiguous, and choose kernels by strides. So what reads memory as it lies gets its arguments with these strides
(:mod:`~shardwright.lowering.strides`).
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwright._torch_compat import communicates, fake_mode, is_view_operator, operator, traced_graph, writes_in_place
from shardwright.lowering.calls import Call
from shardwright.lowering.strides import as_traced, reads_as_it_lies, reads_storage
from shardwright.operators.record import RESHAPE, OperatorRecord, draws, record
from shardwright.program.dataflow import Compute
from shardwright.program.footprints import Strided
from shardwright.program.nodes import kept_outputs

_TRACES: dict[Any, tuple[fx.Graph, list[tuple[tuple[int, ...], torch.dtype]]]] = {}


def trace(
    node: Compute,
    call: Call,
    like: Sequence[Strided],
    arriving: Sequence[int],
    returning: Sequence[int],
    device: torch.device,
    lying: Mapping[int, tuple[int, ...]] | None = None,
) -> Traced | None:
    """The node forward and backward as plain functions, or nothing where that cannot be done. ``lying``: the strides of the
    gradients that arrive, by result, where they are known; others are taken to be contiguous."""
    strides = tuple((lying or {}).get(i) for i in arriving)
    key = (node.call, tuple(like), tuple(arriving), strides, device)
    random = draws(node.local, node.rules.kind)
    try:
        # A kernel may be another one next time, a random piece at another place.
        if node.kernel is not None or random or key not in _TRACES:
            _TRACES[key] = _joint(call, node.call.slots, like, arriving, strides, device)
        graph, shapes = _TRACES[key]
    except Exception:  # whatever an operator raises without data: autograd will run it
        return None
    called = [n.target for n in graph.nodes if n.op == "call_function"]
    if any(writes_in_place(target) or communicates(target) or reads_storage(target) for target in called):
        return None
    if any(_strides_hang_on_data(n) for n in graph.nodes if n.op == "call_function"):
        return None
    if random and not any(
        each.early and each.draws for each in map(_known, called)
    ):  # drawn by the operator itself: once, when it was traced
        return None
    outputs = set(kept_outputs(node))
    kept_results = tuple(i for i, o in enumerate(node.outputs) if o is not None and o in outputs)
    parts = _Parts(graph, len(like), node.footprint.saved_inputs, kept_results)
    if any(n in parts.late for n in parts.early):
        return None
    if any(parts.inputs[n] in returning for n in parts.crossing if n in parts.inputs):
        return None  # would be kept although it is to be freed
    return Traced(call, parts, arriving, shapes, len(like))


def _joint(
    call: Call,
    slots: Sequence[int],
    like: Sequence[Strided],
    arriving: Sequence[int],
    strides: Sequence[tuple[int, ...] | None],
    device: torch.device,
) -> tuple[fx.Graph, list[tuple[tuple[int, ...], torch.dtype]]]:
    """A graph of the operator and of the gradients of all its inputs, and how the gradients that arrive look."""
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = []

    def joint(tensors: list[Tensor], gradients: list[Tensor]) -> Any:
        distinct: dict[int, Tensor] = {}
        for slot, x, lies in zip(slots, tensors, like, strict=True):
            distinct.setdefault(slot, x.detach().requires_grad_(lies.grad))
        leaves = [distinct[slot] for slot in slots]
        made = call(*leaves)
        followed = [made[i] for i in arriving]
        wanted = list({id(x): x for x in leaves if x.requires_grad}.values())
        found = torch.autograd.grad(followed, wanted, gradients, allow_unused=True)
        by_leaf = {id(x): g for x, g in zip(wanted, found, strict=True)}
        return [x.detach() if isinstance(x, Tensor) else None for x in made], [by_leaf.get(id(x)) for x in leaves]

    with fake_mode() as mode:
        tensors = [torch.empty_strided(x.shape, x.strides, dtype=getattr(torch, x.dtype), device=device) for x in like]
        made = call(*tensors)
        gradients = [
            torch.empty_like(made[i], memory_format=torch.contiguous_format)
            if lie is None
            else made[i].new_empty_strided(made[i].shape, lie)
            for i, lie in zip(arriving, strides, strict=True)
        ]
        shapes = [(tuple(g.shape), g.dtype) for g in gradients]
        with torch.enable_grad():
            graph = traced_graph(joint, tensors, gradients, mode)
    return graph, shapes


class _Parts:
    """A traced operator in two parts. ``crossing``: the values of the forward part that the backward part reads."""

    def __init__(self, graph: fx.Graph, inputs: int, kept_inputs: Sequence[int], kept_results: Sequence[int]) -> None:
        nodes = list(graph.nodes)
        places = [n for n in nodes if n.op == "placeholder"]
        self.inputs = {n: i for i, n in enumerate(places[:inputs])}
        self.arriving = places[inputs:]
        output = next(n for n in nodes if n.op == "output")
        flat = list(output.args[0])  # the results, then a gradient for every input
        made, self.gradients = flat[:-inputs], flat[-inputs:]
        self.results = [_plain(x) for x in made]
        self.same = {n: _plain(n) for n in nodes}
        self.nodes = [n for n in nodes if n.op == "call_function"]
        self.early = [n for n in self.nodes if _known(n.target).early]
        self.late: set[fx.Node] = set(self.arriving)
        for n in self.nodes:
            if any(x in self.late for x in n.all_input_nodes):
                self.late.add(n)
        self.there: dict[fx.Node, tuple[str, int]] = {
            n: ("input", i) for n, i in self.inputs.items() if i in kept_inputs
        }
        for place in kept_results:
            if isinstance(self.results[place], fx.Node):
                self.there.setdefault(self.results[place], ("result", place))
        self.leading: set[fx.Node] = {x for x in self.results if isinstance(x, fx.Node)}
        """What the results are made of."""
        for n in reversed(self.nodes):
            if n in self.leading:
                self.leading.update(map(_plain, n.all_input_nodes))
        self.crossing: list[fx.Node] = []
        for n in self.nodes:
            for x in n.all_input_nodes if n in self.late else ():
                self._cross(_plain(x))
        for gradient in self.gradients:
            if isinstance(gradient, fx.Node):
                self._cross(_plain(gradient))

    def _cross(self, node: fx.Node) -> None:
        """A value that the backward part reads; a view of an input, or a constant, is made again instead, and so is what
        only the backward needs."""
        if node in self.late or node in self.there or node in self.crossing or self._made_late(node):
            return
        if node.op == "call_function" and self._cheap(node):
            for x in node.all_input_nodes:
                self._cross(_plain(x))
            return
        self.crossing.append(node)

    def _made_late(self, node: fx.Node) -> bool:
        """Whether the backward part makes a value by itself: no result needs it, and what it is made of is there anyway."""
        if node in self.there:
            return True
        if node.op != "call_function" or node.target is python_operator.getitem or _known(node.target).early:
            return False
        if node in self.leading and not is_view_operator(node.target):
            return False
        return all(self._made_late(_plain(x)) for x in node.all_input_nodes)

    def _cheap(self, node: fx.Node) -> bool:
        return is_view_operator(node.target) and all(
            self._cheap(_plain(x)) if _plain(x).op == "call_function" else True for x in node.all_input_nodes
        )

    def backward(self, wanted: Sequence[int]) -> tuple[Callable[..., list[Tensor | None]], frozenset[int]]:
        """A function of (crossing values, kept inputs and results, gradients) that gives these inputs' gradients, and the
        kept ones whose numbers it reads: of others it only asks how large they are."""
        graph, where = fx.Graph(), {}
        own, kept, grads = (graph.placeholder(name) for name in ("own", "kept", "gradients"))
        count = len(self.inputs)

        def at(holder: fx.Node, place: int) -> fx.Node:
            return graph.call_function(python_operator.getitem, (holder, place))

        def get(node: fx.Node) -> fx.Node:
            node = _plain(node)
            if node not in where:
                if node in self.arriving:
                    where[node] = at(grads, self.arriving.index(node))
                elif node in self.there:
                    kind, place = self.there[node]
                    where[node] = at(kept, place if kind == "input" else count + place)
                elif node in self.crossing:
                    where[node] = at(own, self.crossing.index(node))
                else:
                    where[node] = _copied(graph, node, get)
            return where[node]

        needed = [g if not isinstance(g, fx.Node) else get(g) for g in (self.gradients[i] for i in wanted)]
        graph.output(needed)
        for node in graph.nodes:
            _compute_only_what_is_read(node)
        read = {x.args[1] for x in kept.users if not all(_only_measures(user) for user in x.users)}
        return _function(graph, 3), frozenset(read)  # type: ignore[arg-type]  # places

    def forward(self) -> Callable[..., Any] | None:
        """A function of the inputs that gives results and crossing values; nothing where the operator itself will do."""
        known = all(n in self.inputs or n in self.results for n in self.crossing)
        if not self.early and known and not any(reads_as_it_lies(n.target) for n in self.nodes if n in self.leading):
            return None
        graph, where = fx.Graph(), {}
        places = {n: graph.placeholder(f"x{i}") for n, i in self.inputs.items()}
        places |= {n: graph.placeholder(f"e{i}") for i, n in enumerate(self.early)}

        def get(node: fx.Node) -> fx.Node:
            node = _plain(node)
            if node not in where:
                where[node] = places[node] if node in places else _copied(graph, node, get)
            return where[node]

        for n in self.nodes:  # in the order of the operator itself
            if n not in self.late and not _known(n.target).alias:
                get(n)
        results = [get(x) if isinstance(x, fx.Node) else None for x in self.results]
        graph.output((results, [get(n) for n in self.crossing]))
        graph.eliminate_dead_code()
        return _function(graph, len(places))

    def beginning(self) -> tuple[Callable[..., list[Tensor]], tuple[int, ...]] | None:
        """The early part as a function of some of the inputs, and which these are."""
        if not self.early:
            return None
        graph, where = fx.Graph(), {}
        needed: set[fx.Node] = set()
        for n in reversed(self.nodes):
            if n in needed or n in self.early:
                needed.update(n.all_input_nodes)
        read = [n for n in self.inputs if n in needed]
        where = {n: graph.placeholder(f"x{self.inputs[n]}") for n in read}
        for n in self.nodes:
            if n in needed or n in self.early:
                where[n] = _copied(graph, n, where.__getitem__)
        graph.output([where[n] for n in self.early])
        return _function(graph, len(read)), tuple(self.inputs[n] for n in read)


class Traced:
    """An operator by its traced functions."""

    def __init__(
        self,
        call: Call,
        parts: _Parts,
        arriving: Sequence[int],
        shapes: list[tuple[tuple[int, ...], torch.dtype]],
        inputs: int,
    ) -> None:
        self.call, self.parts, self.arriving, self.shapes = call, parts, tuple(arriving), shapes
        self._forward = parts.forward()
        beginning = parts.beginning()
        self._beginning = None if beginning is None else beginning[0]
        self.early_inputs = None if beginning is None else beginning[1]
        self._crossing = (
            [(0, parts.inputs[n]) if n in parts.inputs else (1, parts.results.index(n)) for n in parts.crossing]
            if self._forward is None
            else []
        )
        self._backward: dict[tuple[int, ...], tuple[Callable[..., list[Tensor | None]], frozenset[int]]] = {}

    @property
    def several(self) -> bool:
        """Whether the operator is written down as several others."""
        return self._forward is not None

    def early(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What is drawn and exchanged, from the inputs at ``early_inputs``."""
        return [] if self._beginning is None else self._beginning(*inputs)

    def forward(self, inputs: Sequence[Tensor], begun: Sequence[Tensor] | None = None) -> tuple[tuple[Any, ...], Any]:
        """``begun``: the early part, where it has been done before."""
        if self._forward is not None:
            if begun is None:
                begun = self.early([inputs[i] for i in self.early_inputs or ()])
            return self._forward(*inputs, *begun)
        made = self.call(*inputs)
        return made, [inputs[i] if which == 0 else made[i] for which, i in self._crossing]

    def backward(
        self,
        own: Any,
        kept: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        wanted: Sequence[int],
        last: bool,
    ) -> list[Tensor | None]:
        arrived = [gradients[i] for i in self.arriving]
        if any(g is None for g in arrived):
            like = next(g for g in arrived if g is not None)
            arrived = [
                like.new_zeros(shape, dtype=dtype) if g is None else g
                for g, (shape, dtype) in zip(arrived, self.shapes, strict=True)
            ]
        return self._made(wanted)[0](own, kept, arrived)

    def reads(self, wanted: Sequence[int]) -> frozenset[int]:
        """The kept inputs, then results, whose numbers the gradients of these inputs are made of."""
        return self._made(wanted)[1]

    def _made(self, wanted: Sequence[int]) -> tuple[Callable[..., list[Tensor | None]], frozenset[int]]:
        chosen = tuple(wanted)
        if chosen not in self._backward:
            self._backward[chosen] = self.parts.backward(chosen)
        return self._backward[chosen]


def _strides_hang_on_data(node: fx.Node) -> bool:
    """Whether it would have to be given strides that no two calls need share: those of the rows that a mask selects, say."""
    values = (x.meta.get("val") for x in node.all_input_nodes) if reads_as_it_lies(node.target) else ()
    return any(isinstance(value, torch.SymInt) for x in values if isinstance(x, Tensor) for value in x.stride())


def _only_measures(node: fx.Node) -> bool:
    """Whether an operator reads nothing but how large its argument is."""
    return _known(node.target).only_measures and len(node.all_input_nodes) == 1


def _known(target: Any) -> OperatorRecord:
    """What is known about an operator of a trace."""
    return record(str(target))


def _plain(node: Any) -> Any:
    """The value itself behind operators that return it as it is."""
    while isinstance(node, fx.Node) and node.op == "call_function" and _known(node.target).alias:
        node = node.args[0]
    return node


def _copied(graph: fx.Graph, node: fx.Node, get: Callable[[fx.Node], fx.Node]) -> fx.Node:
    # A tensor may come with other strides than it was traced with, where only a reshape is sure to work.
    target: Any = operator(RESHAPE) if _known(node.target).reshapes else node.target

    def given(x: fx.Node) -> fx.Node:
        there = get(x)
        if not reads_as_it_lies(target) or not isinstance(val := x.meta.get("val"), Tensor):
            return there
        return graph.call_function(as_traced, (there, tuple(val.stride())))

    return graph.call_function(target, fx.map_arg(node.args, given), fx.map_arg(node.kwargs, given))


def _compute_only_what_is_read(node: fx.Node) -> None:
    """An operator that gives several gradients and takes a mask of those wanted (a convolution's: of its input, its weight,
    its bias): gradients of inputs and of weights are instructions of their own, and each would compute both."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    place = next((i for i, argument in enumerate(arguments) if argument.name == "output_mask"), None)
    if place is not None and len(node.args) > place:
        read = {user.args[1] for user in node.users if user.target is python_operator.getitem}
        read |= _known(node.target).always_writes
        mask: Any = node.args[place]
        node.update_arg(place, [wanted and i in read for i, wanted in enumerate(mask)])


def _function(graph: fx.Graph, arguments: int) -> Callable[..., Any]:
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)
    forward = scope["forward"]
    return lambda *given: forward(None, *given)
