"""Makes in-place operators functional, on purpose and visibly.

The nodes are walked once, in order. A tensor and its views form a family around one root; writing into any member
gives a new value to the member and, backwards through the views, to the root (``slice`` becomes ``slice_scatter``, a
transposition its own inverse). A later read of another member is taken from the root's new value. This is PyTorch's
own functionalisation, done on the exported graph so that composite operators stay whole and every node keeps its
module and source line. What has no inverse here falls back to ``run_decompositions({})``, which is general but takes
operators apart.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from shardwright._torch_compat import has_data
from shardwright.errors import CaptureError
from shardwright.frontend.provenance import module_of, source_of
from shardwright.frontend.regions import NO_GRAD
from shardwright.frontend.views import aliased_inputs, name_of, put_back, reversible

MUTATED = "shardwright_mutated"
"""Key in a placeholder's meta: the node that holds its value after the call."""

_ROOT = "shardwright_root"
"""Key in the meta of a batch norm's new statistic: the placeholder it is a later value of."""

_BATCH_NORM_FUNCTIONAL = torch.ops.aten._native_batch_norm_legit_functional.default
_ZERO, _FILL, _COPY = torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.copy_.default
_FILL_FROM = torch.ops.aten.fill_.Tensor
_OVERWRITING = {_ZERO, _FILL, _FILL_FROM, _COPY}
_CARRIERS = {"view", "reshape", "expand", "to", "_to_copy", "lift_fresh_copy", "lift_fresh", "clone", "detach"}


def functionalise(program: ExportedProgram) -> ExportedProgram:
    """A program without in-place operators, equal in every result."""
    if any(_written(node) for node in program.graph.nodes):
        _refuse_hidden_writes(program)
        if any(not _manageable(node) for node in program.graph.nodes):
            return _without_copies(program.run_decompositions({}))
        _Families(program).rewrite()
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    for node in order:
        if node.target is torch.ops.aten.batch_norm.default and node.args[5]:
            _functional_batch_norm(program, node, order)
        elif node.target is torch.ops.aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise CaptureError(
                "The model has an instance norm that tracks running statistics, which has no functional form.",
                "Build it with track_running_stats=False.",
            )
    return program


def _refuse_hidden_writes(program: ExportedProgram) -> None:
    """Under no_grad, or through detach(), autograd does not see a write into a tensor it tracks: no functional form has
    those gradients."""
    tracked: set[Node] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad:
            tracked.add(node)
        if node.op != "call_function":
            continue
        if node.meta.get(NO_GRAD):
            if any(target in tracked and target.op != "placeholder" for target in _written(node)):
                raise CaptureError(
                    f"The model writes into a tensor that has a gradient, under no_grad, at {source_of(node)} "
                    f"(module {module_of(node)!r}).",
                    "Compute a new tensor instead, and detach it if no gradient shall flow.",
                )
        elif (
            node.target is not torch.ops.aten.detach.default
            and tracked & set(node.all_input_nodes)
            and _continuous(value)
        ):
            tracked.add(node)
        for root in tracked.intersection(filter(None, map(_detached_from, _written(node)))):
            raise CaptureError(
                f"The model writes into a detached tensor at {source_of(node)} (module {module_of(node)!r}), and so into "
                "one that has a gradient, behind the back of autograd.",
                "Write into a copy: detach().clone()."
                if root.op != "placeholder"
                else "Bound a parameter after the optimizer's step (under torch.no_grad()), or clamp what is read of it.",
            )


def _continuous(value: Any) -> bool:
    """Whether it can have a gradient, as a mask made of scores cannot."""
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def _detached_from(member: Node) -> Node | None:
    """What a view was taken of, if detach() lies between; writing into the view writes into that too."""
    detached = False
    while above := aliased_inputs(member) or _written(member):
        detached |= member.target is torch.ops.aten.detach.default
        member = above[0]
    return member if detached else None


def _written(node: Node) -> list[Node]:
    """The arguments this operator writes into."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or not schema.is_mutable:
        return []
    positional = list(node.args) + [node.kwargs.get(a.name) for a in schema.arguments[len(node.args) :]]
    return [
        value
        for argument, value in zip(schema.arguments, positional, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node)
    ]


def _twin(node: Node) -> Any:
    """``aten.add_.Tensor`` → ``aten.add.Tensor``, where that exists and one argument is written."""
    namespace, name = node.target._schema.name.split("::")  # type: ignore[union-attr] # it has written, so it has a schema
    if not name.endswith("_") or len(_written(node)) != 1:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    twin = getattr(packet, node.target._overloadname, None)  # type: ignore[union-attr]
    if twin is None and (plain := getattr(packet, "default", None)) is not None:  # floor_divide_.Tensor
        kinds = [[str(a.type) for a in each._schema.arguments] for each in (node.target, plain)]  # type: ignore[union-attr]
        twin = plain if kinds[0] == kinds[1] else None
    return twin


def _reshapes(node: Node) -> bool:
    """Whether an in-place operator only looks at its target in another way: ``unsqueeze_``, ``transpose_``."""
    twin = None if node.target in _OVERWRITING else _twin(node)
    return twin is not None and any(result.alias_info is not None for result in twin._schema.returns)


def _manageable(node: Node) -> bool:
    """Whether this operator writes nothing, or has a functional twin and a way back to what it writes into."""
    written = _written(node)
    if written and node.target not in _OVERWRITING and _twin(node) is None:
        return False
    for member in written:
        while above := aliased_inputs(member) or _written(member):
            if not _written(member) and not isinstance(member.meta.get("val"), tuple | list) and not reversible(member):
                return False
            member = above[0]
    return True


class _Families:
    """For every tensor the root it shares memory with, the views in between, and the node that holds its value now."""

    def __init__(self, program: ExportedProgram) -> None:
        self.graph = program.graph
        lifted = program.graph_signature.inputs_to_lifted_tensor_constants
        self.constants = {name: program.constants[target] for name, target in lifted.items()}
        self.parent: dict[Node, Node] = {}
        self.value: dict[Node, Node] = {}
        self.written_at: dict[Node, int] = {}
        self.made_at: dict[Node, int] = {}
        self.reshaped: set[Node] = set()
        self.time = 0

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                self._visit(node)
        for node in reversed(list(self.graph.nodes)):
            if _written(node):
                self.graph.erase_node(node)
        for root, value in self.value.items():
            if root.op == "placeholder" and root in self.written_at:
                root.meta[MUTATED] = value

    def _visit(self, node: Node) -> None:
        written = _written(node)
        if not written:
            if above := aliased_inputs(node):
                self.parent[node] = above[0]
            node.args = torch.fx.map_arg(node.args, self._current)
            node.kwargs = torch.fx.map_arg(node.kwargs, self._current)
            self._hold(node, node)
            return
        target = written[0]
        args = torch.fx.map_arg(node.args, self._current)
        kwargs = torch.fx.map_arg(node.kwargs, self._current)
        if _reshapes(node):  # nothing is written: other views of the same memory stay what they are
            fresh = self._call(_twin(node), args, node, node, kwargs)
            self.reshaped.add(self._root(target))
            self.parent[node] = target
            self._hold(target, fresh)
            self._hold(node, fresh)
            return
        fresh = self._written_value(node, self._current(target), args, kwargs)
        self.time += 1
        self._write(target, fresh)
        # The operator returns what it wrote into: from here on it is another name of its target.
        self.parent[node] = target
        self._hold(node, fresh)

    def _written_value(self, node: Node, target: Node, args: Any, kwargs: Any) -> Node:
        if node.target in _OVERWRITING:
            number = 0 if node.target is _ZERO else self._number(args[1])
            if number is not None:
                return self._call(torch.ops.aten.full_like.default, (target, number), node, target)
            return _copied(self.graph, args[1], node, target)
        fresh = self._call(_twin(node), args, node, target, kwargs)
        if fresh.meta["val"].dtype != target.meta["val"].dtype:
            fresh = self._call(torch.ops.aten.to.dtype, (fresh, target.meta["val"].dtype), node, target)
        return fresh

    def _number(self, value: Any) -> bool | int | float | None:
        """The plain number that ``value`` is, however a device chose to wrap it (``x[0] = 1.0`` does so in two ways)."""
        while isinstance(value, Node) and value.op == "call_function" and name_of(value) in _CARRIERS:
            value = value.args[0]
        if isinstance(value, Node) and value.name in self.constants:
            constant = self.constants[value.name]
            return constant.item() if constant.numel() == 1 and has_data(constant) else None
        if isinstance(value, Node) and value.target is torch.ops.aten.scalar_tensor.default:
            value = value.args[0]
        return value if isinstance(value, bool | int | float) else None

    def _call(self, function: Any, args: Any, origin: Node, like: Node, kwargs: Any = None) -> Node:
        return _call(self.graph, function, args, origin, like.meta["val"], kwargs)

    def _write(self, member: Node, fresh: Node) -> None:
        """Give ``member`` a new value and hand it up to the root."""
        while member in self.parent:
            self._hold(member, fresh)
            above = self.parent[member]
            if member.target is operator.getitem:
                above = self.parent[above]  # a piece of a list goes straight back into what was cut
            if not _written(member):  # an earlier in-place operator is only another name of its target
                self._refuse_reshaped(member)
                fresh = put_back(self.graph, member, self._current(above), fresh)
            member = above
        self._hold(member, fresh)
        self.written_at[member] = self.time

    def _refuse_reshaped(self, member: Node) -> None:
        """A view is no way from a tensor to its part once the tensor has another shape."""
        if self._root(member) in self.reshaped:
            raise CaptureError(
                f"The model changes the shape of a tensor in place and then writes into memory that a view shares with it, "
                f"at {source_of(member)} (module {module_of(member)!r}).",
                "Give the reshaped tensor a name of its own: x = x.unsqueeze(1) in place of x.unsqueeze_(1).",
            )

    def _hold(self, member: Node, value: Node) -> None:
        self.value[member] = value
        self.made_at[member] = self.time

    def _root(self, node: Node) -> Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def _current(self, node: Node) -> Node:
        """The node that holds the value of ``node`` now, taken again from its root if that was written since."""
        root = self._root(node)
        if self.written_at.get(root, -1) <= self.made_at.get(node, -1):
            return self.value.get(node, node)
        if node is root:
            return self.value[root]
        above = self.parent[node]
        if _written(node):
            again = self._current(above)
        else:
            self._refuse_reshaped(node)
            again = self.graph.node_copy(node, lambda n: self._current(n) if n is above else self.value.get(n, n))
        self._hold(node, again)
        return again


def _call(graph: torch.fx.Graph, function: Any, args: Any, origin: Node, value: Any, kwargs: Any = None) -> Node:
    fresh = graph.call_function(function, tuple(args), dict(kwargs or {}))
    fresh.meta = {**origin.meta, "val": value}
    return fresh


def _copied(graph: torch.fx.Graph, source: Node, origin: Node, target: Node) -> Node:
    """What ``target`` is when ``source`` was copied into it: aten.copy has no derivative, a cast and a broadcast have."""
    held, wanted = source.meta["val"], target.meta["val"]
    if held.dtype != wanted.dtype:
        source = _call(graph, torch.ops.aten.to.dtype, (source, wanted.dtype), origin, held.to(wanted.dtype))
    if held.shape != wanted.shape:
        source = _call(graph, torch.ops.aten.expand.default, (source, list(wanted.shape)), origin, wanted)
    return source


def _without_copies(program: ExportedProgram) -> ExportedProgram:
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.copy.default:
            with program.graph.inserting_before(node):
                node.replace_all_uses_with(_copied(program.graph, node.args[1], node, node.args[0]))
            program.graph.erase_node(node)
    return program


def _functional_batch_norm(program: ExportedProgram, node: Node, order: dict[Node, int]) -> None:
    """Replace a training batch norm by the form that returns the new statistics; later readers see those."""
    x, weight, bias, mean, variance, _training, momentum, epsilon, *_ = node.args
    if not isinstance(mean, Node) or not isinstance(variance, Node):
        return
    if not node.users:
        weight = bias = None  # nobody reads what they make; the statistics do not depend on them
    graph = program.graph
    with graph.inserting_before(node):
        whole = graph.call_function(_BATCH_NORM_FUNCTIONAL, (x, weight, bias, mean, variance, True, momentum, epsilon))
        results = [graph.call_function(operator.getitem, (whole, i)) for i in (0, 3, 4)]
    values = [node.meta["val"], mean.meta["val"], variance.meta["val"]]
    whole.meta = {**node.meta, "val": (values[0], values[1], values[1], values[1], values[2])}
    for result, value in zip(results, values, strict=True):
        result.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(results[0])
    for held, fresh in ((mean, results[1]), (variance, results[2])):
        held.replace_all_uses_with(fresh, delete_user_cb=lambda user: order.get(user, -1) > order[node])
        # A module called twice has given its statistics a first new value already.
        root = held.meta.get(_ROOT, held)
        fresh.meta[_ROOT] = root
        root.meta[MUTATED] = fresh
    graph.erase_node(node)
