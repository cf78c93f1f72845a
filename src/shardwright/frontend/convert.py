"""From a functional exported program to our own :class:`Graph`: names, arguments, provenance, gradients.

Assertions, operators without effect (``to`` the dtype a tensor already has) and dead code are dropped; a scalar read
from data is refused, since a plan made for one value would be wrong for the next.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Node

from shardwright._torch_compat import dump_tree, flatten_with_paths, has_data, is_operator, schema
from shardwright.errors import CaptureError
from shardwright.frontend.functionalise import MUTATED
from shardwright.frontend.gradients import is_differentiable
from shardwright.frontend.masks import without_idle_masks
from shardwright.frontend.provenance import module_of, source_of
from shardwright.frontend.prune import pruned
from shardwright.frontend.regions import NO_GRAD
from shardwright.graph import Atom, Buffer, Constant, Graph, Input, Op, Parameter, Ref, Tensor, Value

_SHAPED_LIKE = {
    "aten.expand_as.default": "aten.expand.default",
    "aten.view_as.default": "aten.view.default",
    "aten.reshape_as.default": "aten.reshape.default",
}
"""Operators that read the shape of another tensor, and those that are told it: the other's values need not be there."""


def convert(program: ExportedProgram, model: torch.nn.Module, returned: Sequence[str] = ()) -> Graph:
    """Rewrite ``program`` in our words; what is inside the arguments that are ``returned`` may be changed in place."""
    return _Conversion(program, model, returned).graph()


class _Conversion:
    """The state of one conversion: what each node is called, and what has been collected so far."""

    def __init__(self, program: ExportedProgram, model: torch.nn.Module, returned: Sequence[str]) -> None:
        self.program = program
        self.model = model
        self.handed_back = tuple(f"[0][{name}]" if name.isdigit() else f"[1]['{name}']" for name in returned)
        self.names: dict[Node, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.tracked: set[str] = set()
        """Tensors that carry a gradient where parameters are trained or an input requires one."""

    def graph(self) -> Graph:
        parameters, buffers, constants, inputs = self._sources()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._operator(node)
            elif node.op == "get_attr":
                constants.append(self._attribute(node))
        outputs, mutations = self._results(buffers, inputs)
        spec = self.program.call_spec
        whole = Graph(
            tensors=self.tensors,
            ops=tuple(self.ops),
            inputs=tuple(inputs),
            outputs=outputs,
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            constants=tuple(constants),
            mutations=mutations,
            input_tree=_tree_text(spec.in_spec),
            output_tree=_tree_text(spec.out_spec),
            training=self.model.training,
        )
        return pruned(without_idle_masks(whole))

    def _sources(self) -> tuple[list[Parameter], list[Buffer], list[Constant], list[Input]]:
        nodes = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        tied = _tied_names(self.model)
        trainable = dict(self.model.named_parameters())
        parameters: list[Parameter] = []
        buffers: list[Buffer] = []
        constants: list[Constant] = []
        inputs: list[Input] = []
        held: dict[tuple[str, ...], str] = {}
        paths = iter([p for p, _ in flatten_with_paths(self.program.example_inputs)])
        for spec in self.program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                path = next(paths, "")
                if isinstance(spec.arg, ConstantArgument):
                    inputs.append(Input(None, _plain(spec.arg.value), path))
                    continue
                given = self._tensor(nodes[spec.arg.name])
                inputs.append(Input(given, None, path))
                self.tracked.update([given] if is_differentiable(self.tensors[given].dtype) else ())
                continue
            target = str(spec.target)
            if spec.kind is InputKind.PARAMETER and tied[target] in held:  # export lists a tied weight once per path
                self.names[nodes[spec.arg.name]] = Ref(held[tied[target]])
                continue
            name = self._tensor(nodes[spec.arg.name])
            if spec.kind is InputKind.PARAMETER:
                held[tied[target]] = name
                flag = trainable[tied[target][0]].requires_grad
                parameters.append(Parameter(name, tied[target], flag))
                self.tensors[name] = replace(self.tensors[name], grad=flag)
                self.tracked.update([name] if flag else ())
            elif spec.kind is InputKind.BUFFER:
                buffers.append(Buffer(name, target, bool(spec.persistent)))
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                constants.append(Constant(name, _raw_bytes(self.program.constants[target], target)))
            else:
                raise CaptureError(
                    f"The model uses {spec.kind.name.lower().replace('_', ' ')} {target!r}, which has no tensor form.",
                    "Pass it as a plain Python value or make it a tensor.",
                )
        return parameters, buffers, constants, inputs

    def _tensor(self, node: Node) -> str:
        value = node.meta["val"]
        self.tensors[node.name] = Tensor(node.name, _shape(value, node), _dtype(value))
        self.names[node] = Ref(node.name)
        return node.name

    def _attribute(self, node: Node) -> Constant:
        value = getattr(self.program.graph_module, str(node.target))
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"The graph keeps a submodule {node.target!r} that has no functional form.",
                "Simplify the control flow.",
            )
        node.meta.setdefault("val", value)
        return Constant(self._tensor(node), _raw_bytes(value, str(node.target)))

    def _operator(self, node: Node) -> None:
        if node.target is operator.getitem:
            self.names[node] = self.names[node.args[0]][node.args[1]]  # type: ignore[index] # a getitem of a node
            return
        target, args = _target(node), node.args
        value = node.meta.get("val")
        inputs = [self.tensors[self.names[n].name] for n in node.all_input_nodes if isinstance(self.names.get(n), Ref)]
        if target in _SHAPED_LIKE:
            target, args, inputs = _SHAPED_LIKE[target], (node.args[0], _shape(node.meta["val"], node)), inputs[:1]
        same = _unchanged(target, node, inputs, self.tracked)
        if same is not None:
            self.names[node] = Ref(same.name)
            return
        differentiable = not node.meta.get(NO_GRAD, False)
        carries = differentiable and target != "aten.detach.default"
        flows = carries and any(t.grad for t in inputs)
        tracked = carries and any(t.name in self.tracked for t in inputs)
        many = isinstance(value, tuple | list)
        outputs: list[str | None] = []
        for index, item in enumerate(value if many else (value,)):  # type: ignore[arg-type] # checked by many
            if item is None:
                outputs.append(None)
                continue
            if not isinstance(item, torch.Tensor):
                raise CaptureError(
                    f"The model reads a scalar from data: {target} at {source_of(node)} (module {module_of(node)!r}).",
                    "Pass the value as a Python number, or keep it a tensor (torch.where instead of if).",
                )
            name = f"{node.name}.{index}" if many else node.name
            floats = item.dtype.is_floating_point or item.dtype.is_complex
            self.tensors[name] = Tensor(name, _shape(item, node), _dtype(item), flows and floats)
            self.tracked.update([name] if tracked and floats else ())
            outputs.append(name)
        self.names[node] = [None if o is None else Ref(o) for o in outputs] if many else Ref(outputs[0] or "")
        self.ops.append(
            Op(
                name=node.name,
                target=target,
                args=tuple(self._value(a) for a in args),
                kwargs=tuple((k, self._value(v)) for k, v in _keywords(node, target).items()),
                outputs=tuple(outputs),
                module=module_of(node),
                source=source_of(node),
                grad=differentiable,
            )
        )

    def _value(self, value: Any) -> Value:
        if isinstance(value, Node):
            named = self.names[value]
            return tuple(named) if isinstance(named, list) else named
        if isinstance(value, tuple | list):
            return tuple(self._value(v) for v in value)
        return _plain(value)

    def _results(
        self, buffers: list[Buffer], inputs: list[Input]
    ) -> tuple[tuple[Value, ...], tuple[tuple[str, str], ...]]:
        (output,) = [n for n in self.program.graph.nodes if n.op == "output"]
        by_path = {b.path: b.tensor for b in buffers}
        handed_back = {i.tensor for i in inputs if i.path.startswith(self.handed_back)}  # its new value is a result
        mutations: list[tuple[str, str]] = []
        outputs: list[Value] = []
        for spec, value in zip(self.program.graph_signature.output_specs, output.args[0], strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                mutations.append((by_path[str(spec.target)], self.names[value].name))
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                if str(spec.target) not in handed_back:
                    self._refuse_mutation(str(spec.target))
            else:
                outputs.append(self._value(value))
        for node in self.program.graph.nodes:
            if MUTATED in node.meta and node.op == "placeholder" and node.name not in handed_back:
                if node.name not in by_path.values():
                    self._refuse_mutation(node.name)
                mutations.append((node.name, self.names[node.meta[MUTATED]].name))
        return tuple(outputs), tuple(mutations)

    def _refuse_mutation(self, name: str) -> None:
        signature = self.program.graph_signature
        if name in signature.inputs_to_parameters:
            raise CaptureError(
                f"The model changes its parameter {signature.inputs_to_parameters[name]!r} in its forward.",
                "Parameters change in the optimizer's step; make it a buffer, or change a copy.",
            )
        raise CaptureError(
            f"The model changes its input {name!r} in place, which a split model could not hand back.",
            "Clone the input first inside the model, or return the changed tensor.",
        )


def _unchanged(target: str, node: Node, inputs: list[Tensor], tracked: set[str]) -> Tensor | None:
    """The argument that an operator returns as it is: the only one that is not empty (a fresh cache), or the first."""
    if target == "aten.cat.default":
        full = [tensor for tensor in inputs if tensor.elements]
        value = node.meta["val"]
        alone = len(full) == 1 and full[0].dtype == _dtype(value) and full[0].shape == _shape(value, node)
        return full[0] if alone else None
    passes = inputs and _passes_through(target, node, inputs[0], inputs[0].name in tracked)
    return inputs[0] if passes else None


def _passes_through(target: str, node: Node, source: Tensor, tracked: bool) -> bool:
    """Whether the operator returns its first argument unchanged: an alias, a cast to the same dtype, an idle dropout."""
    kind = target.split(".")[1]
    if kind in ("alias", "lift_fresh", "lift_fresh_copy"):
        return True
    if kind == "detach":
        return not tracked
    if kind in ("dropout", "feature_dropout", "alpha_dropout"):
        _, rate, training = (*node.args, *node.kwargs.values())
        return bool(rate == 0 or not training)
    value = node.meta.get("val")
    if kind not in ("to", "type_as", "_to_copy") or not isinstance(value, torch.Tensor):
        return False
    return source.dtype == _dtype(value) and source.shape == _shape(value, node)


def _keywords(node: Node, target: str) -> dict[str, Any]:
    """The keywords that belong in a graph; what is made from nothing says its dtype, not that of the process it runs in."""
    kept = {name: value for name, value in node.kwargs.items() if name not in _left_out(target)}
    value = node.meta.get("val")
    if node.all_input_nodes or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return kept
    if kept.get("dtype") is None and any(argument.name == "dtype" for argument in schema(target).arguments):
        kept["dtype"] = value.dtype
    return kept


def _left_out(target: str) -> tuple[str, ...]:
    """Keywords that say nothing about what is computed: where, and sizes that follow from others (a piece has its own)."""
    hints = ("output_size",) if target == "aten.repeat_interleave.self_int" else ()
    return ("device", "pin_memory", *hints)


def _tied_names(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Every parameter path → all paths of the same parameter, the one torch keeps first."""
    groups: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(path)
    return {path: tuple(paths) for paths in groups.values() for path in paths}


def _shape(value: torch.Tensor, node: Node) -> tuple[int, ...]:
    if not all(isinstance(extent, int) for extent in value.shape):
        raise CaptureError(
            f"Tensor {node.name!r} at {source_of(node)} has a shape that depends on data: {tuple(value.shape)}.",
            "Use an operator with a fixed output shape (masking instead of boolean indexing or nonzero).",
        )
    return tuple(int(extent) for extent in value.shape)


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _plain(value: Any) -> Value:
    if isinstance(value, torch.dtype):
        return Atom("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.layout):
        return Atom("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Atom("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Atom("device", "any")  # a plan says where things run; the graph is the same everywhere
    if isinstance(value, complex):
        return Atom("complex", repr(value))
    if isinstance(value, tuple | list):
        return tuple(_plain(v) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CaptureError(
        f"An argument of type {type(value).__name__} ({value!r}) has no place in a graph.", "Pass plain values."
    )


def _target(node: Node) -> str:
    if is_operator(node.target):
        return str(node.target)
    raise CaptureError(
        f"The model calls {getattr(node.target, '__name__', node.target)} at {source_of(node)}, which is not an operator.",
        "Higher-order operators and Python scalars computed from tensors cannot be split; rewrite that part with tensors.",
    )


def _raw_bytes(value: torch.Tensor, name: str) -> bytes:
    if not has_data(value):
        raise CaptureError(
            f"The plain tensor attribute {name!r} was built on the meta device, so its value is unknown.",
            "Register it as a buffer, or build the model outside torch.device('meta').",
        )
    return bytes(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _tree_text(spec: Any) -> str:
    try:
        return dump_tree(spec) if spec is not None else ""
    except NotImplementedError:
        return ""  # a user's unregistered container; parallelize restores it from the live export instead
