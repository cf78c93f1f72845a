"""Proof that a program is sound, before anything runs.

The walk knows nothing of how the program was made: it derives the layout of every value from the resting layouts, the
operators' rules and the steps themselves, and refuses the first operator whose input does not arrive as its split needs
it, the first step that does not apply, the first unreduced sum that reaches an operator which is not linear in it, and
the first result that is left unreduced. Then the local operators are run on meta tensors, which costs no memory and no
arithmetic, and every local shape is compared with the shard the layouts promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.cluster import Mesh
from shardwright.errors import LoweringError
from shardwright.graph import Graph
from shardwright.lowering.bind import dual
from shardwright.lowering.collectives import BoundStep
from shardwright.lowering.emit import Emitter
from shardwright.lowering.program import Change, Compute, Program, Read, Result, describe, lower
from shardwright.operators import analyse
from shardwright.operators.rules import Need, Window, input_layouts, output_layouts
from shardwright.operators.strategy import Strategy


def validate(graph: Graph, strategy: Strategy, mesh: Mesh) -> None:
    """Refuse a strategy that cannot be run, naming the operator.

    Examples
    --------
    >>> validate(graph, plan.strategy, plan.mesh)                             # doctest: +SKIP

    Raises
    ------
    LoweringError
    """
    for coordinate in {(0,) * len(mesh.sizes), tuple(size - 1 for size in mesh.sizes)}:  # largest and smallest shards
        validate_program(lower(graph, strategy, mesh, coordinate, device="meta"))


def validate_program(program: Program) -> None:
    """Refuse a program that is not sound; see the module's text. It must have been lowered for the meta device."""
    layouts: dict[str, tuple[Need, ...]] = {}
    for step in program.instructions:
        if isinstance(step, Read):
            layouts[step.result] = _resting(program, step)
        elif isinstance(step, Change):
            layouts[step.result] = _changed(program, step, layouts[step.source])
        else:
            _computed(program, step, layouts)
    for result in program.results:
        if isinstance(result, Result) and any(isinstance(p, Partial) for p in layouts[result.value]):
            raise LoweringError(f"output {result.tensor!r} would be handed out unreduced.", "Make the plan again.")
    for buffer, value in program.mutations:
        if layouts[value] != program.strategy.resting[buffer]:
            resting = program.strategy.resting[buffer]
            raise LoweringError(
                f"buffer {buffer!r} rests as {resting}, its new value comes as {layouts[value]}.",
                "Make the plan again.",
            )
    _check_shapes(program, layouts)


def _resting(program: Program, read: Read) -> tuple[Need, ...]:
    layout = program.strategy.resting[read.tensor]
    shape = program.graph.tensors[read.tensor].shape
    for placement in layout:
        if isinstance(placement, Partial) or (isinstance(placement, Shard) and placement.dim >= len(shape)):
            raise LoweringError(f"{read.tensor!r} of shape {shape} cannot rest as {layout}.", "Make the plan again.")
    return tuple(layout)


def _changed(program: Program, change: Change, source: tuple[Need, ...]) -> tuple[Need, ...]:
    reached = _follow(program, change, change.forward, source)
    if reached != change.layout:
        raise _broken(change, f"its steps lead to {reached}, not to {change.layout}")
    result = any(isinstance(r, Result) and r.value == change.result for r in program.results)
    if program.graph.tensors[change.tensor].grad and not result and not change.result.endswith("__result"):
        returned = _follow(program, change, change.backward, dual(reached))
        if returned != dual(source):
            raise _broken(change, f"its gradient comes back as {returned}, not as {dual(source)}")
    return reached


def _follow(program: Program, change: Change, steps: Sequence[BoundStep], start: tuple[Need, ...]) -> tuple[Need, ...]:
    layout = list(start)
    names = [name for name, _ in program.place.axes]
    for step in steps:
        axis = names.index(step.line.group)
        here = layout[axis]
        after = _after(step, here)
        if after is None:
            raise _broken(change, f"step {step.kind} along {step.line.group} does not apply to {tuple(layout)}")
        touched = {n.dim for n in (here, after) if isinstance(n, (Shard, Window))}
        others = layout[:axis] + layout[axis + 1 :]
        windowed = any(isinstance(n, Window) for n in (here, after))  # its regions are stated for a dim cut only here
        if any(
            isinstance(n, (Shard, Window)) and n.dim in touched for n in (others if windowed else layout[axis + 1 :])
        ):
            raise _broken(
                change, f"step {step.kind} along {step.line.group} would break the nesting of {tuple(layout)}"
            )
        layout[axis] = after
    return tuple(_as_window(need, wanted) for need, wanted in zip(layout, change.layout, strict=True))


def _after(step: BoundStep, here: Need) -> Need | None:
    """The placement a step leads to, or ``None`` where it does not apply."""
    shard, partial, whole = Shard(step.dim), isinstance(here, Partial), isinstance(here, Replicate)
    windowed = bool(step.wants)
    cut = here == shard or (windowed and isinstance(here, Window) and here.dim == step.dim)
    to_window = Window(step.dim, 0, 0, 0)
    table: dict[str, tuple[bool, Need]] = {
        "all_gather": (here == shard, Replicate()),
        "all_reduce": (partial, Replicate()),
        "reduce_scatter": (partial, shard),
        "all_to_all": (here == shard, Shard(step.to_dim)),
        "slice": (whole, to_window if windowed else shard),
        "zero_pad": (cut, Partial()),
        "mask": (whole, Partial()),
        "halo": (here == shard, to_window),
        "halo_reduce": (cut, shard),
    }
    applies, result = table.get(step.kind, (False, here))
    return result if applies else None


def _as_window(need: Need, wanted: Need) -> Need:
    """A window step knows the regions but not the rule they came from; the change's own window says the rest."""
    alike = isinstance(need, Window) and isinstance(wanted, Window) and need.dim == wanted.dim
    return wanted if alike else need


def _computed(program: Program, step: Compute, layouts: dict[str, tuple[Need, ...]]) -> None:
    op = next(o for o in (program.graph.producer.get(n) for n in step.outputs if n is not None) if o is not None)
    rules = analyse(op, program.graph.tensors)
    needs = input_layouts(rules, step.split, len(op.inputs))
    for name, value, need in zip(op.inputs, step.inputs, needs, strict=True):
        if layouts[value] != need:
            what = "unreduced" if any(isinstance(n, Partial) for n in layouts[value]) else "wrongly laid out"
            raise LoweringError(
                f"{describe(op)}: its input {name!r} arrives {what}, as {layouts[value]}; its split needs {need}.",
                "Make the plan again.",
            )
    for output, layout in zip(op.outputs, output_layouts(rules, step.split, len(op.outputs)), strict=True):
        if output is None:
            continue
        if program.graph.tensors[output].grad and any(isinstance(p, Partial) and p.reduce_op != "sum" for p in layout):
            raise LoweringError(
                f"{describe(op)}: {output!r} would be left as {layout}, which has no gradient.", "Split it otherwise."
            )
        layouts[output] = tuple(layout)


def _broken(change: Change, why: str) -> LoweringError:
    return LoweringError(f"the change of layout of {change.tensor!r} is broken: {why}.", "Make the plan again.")


def _check_shapes(program: Program, layouts: dict[str, tuple[Need, ...]]) -> None:
    emitter = Emitter(program, {name: name for name, _ in program.place.axes}, torch.device("meta"))
    module = emitter.module()
    tensors = program.graph.tensors
    sources = []
    for name in program.graph.sources:
        shape = program.local_shape(name, program.strategy.resting[name])
        sources.append(torch.empty(shape, dtype=getattr(torch, tensors[name].dtype), device="meta"))
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for value, layout in layouts.items():
        if value in tensors and value in emitter.values and not any(isinstance(need, Window) for need in layout):
            expected[emitter.values[value].name] = (value, program.local_shape(value, layout))  # type: ignore[arg-type]
    with torch.no_grad():
        _Shapes(module, expected, program).run(*sources)


class _Shapes(fx.Interpreter):
    """Runs the nodes on meta tensors and compares what comes out with what the layouts promise."""

    def __init__(
        self, module: fx.GraphModule, expected: dict[str, tuple[str, tuple[int, ...]]], program: Program
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.expected, self.program = expected, program

    def run_node(self, node: fx.Node) -> Any:
        value, _ = self.expected.get(node.name, (node.name, ()))
        producer = self.program.graph.producer.get(value)
        try:
            result = super().run_node(node)
        except LoweringError:
            raise
        except Exception as error:
            where = describe(producer) if producer is not None else f"the value {value}"
            raise LoweringError(
                f"{where}: its piece does not run on local shapes ({str(error).splitlines()[0]}).",
                "Split it otherwise.",
            ) from error
        if node.name in self.expected and isinstance(result, Tensor):
            _, shape = self.expected[node.name]
            if tuple(result.shape) != shape and producer is not None:
                raise LoweringError(
                    f"{describe(producer)}: its piece gives {tuple(result.shape)}, the layout promises {shape}.",
                    "Split it otherwise.",
                )
        return result
