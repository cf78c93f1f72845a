"""Proof that programs are sound, before anything runs.

The walk over a dataflow knows nothing of how it was made: it derives the layout of every value from the resting layouts, the
operators' rules and the steps themselves, and refuses the first operator whose input does not arrive as its split needs it,
the first step that does not apply, the first unreduced sum that reaches an operator which is not linear in it, and the first
result that is left unreduced; every local operator was run on tensors without data, and its results are compared with the
shards the layouts promise. The walk over a program, section by section as they are performed, checks that every instruction
has its section, that every value is written before it is read, used no more after its last use, and that whatever is started
is awaited; a reduction that follows the last pass may read nothing of a pass but the gradients that arrived. The walk over
the programs of all ranks together checks that the ranks of every group meet in the same collectives in the same order; with
:func:`~shardwright.program.pipeline.check`, which plays the passes of all ranks, none waits for ever.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import LoweringError
from shardwright.operators import analyse
from shardwright.operators.rules import Need, Window, input_layouts, largest_place, output_layouts
from shardwright.operators.strategy import Strategy
from shardwright.program.binding import dual
from shardwright.program.dataflow import Compute, Dataflow, LayoutChange
from shardwright.program.decisions import Decisions
from shardwright.program.footprints import why_not
from shardwright.program.instructions import COMPUTE, REDUCE, UPDATE, Instruction, Kind, Program
from shardwright.program.pieces import describe
from shardwright.program.pipeline import Pipeline, check
from shardwright.program.steps import BoundStep
from shardwright.schedules import BACKWARD, FORWARD

EVERY_RANK = 64
"""Programs of at most this many ranks are compared with each other; of larger meshes, those of the outermost ranks."""


def validate(pipeline: Pipeline, decisions: Sequence[Decisions]) -> None:
    """Refuse stages and a schedule that cannot be run, naming the operator; ``decisions`` are those of every stage.

    Examples
    --------
    >>> validate(Pipeline.of(graph, plan.stages, 1, plan.schedule), [s.decisions for s in plan.stages])  # doctest: +SKIP

    Raises
    ------
    LoweringError
    """
    for number, stage in enumerate(pipeline.stages):
        for size in pipeline.parts:
            programs, places = {}, _places(stage.strategy)
            for rank in stage.ranks:
                if (place := pipeline.coordinate(number, rank)) in places:
                    programs[place] = pipeline.program(number, size, rank, decisions[number])
                    validate_program(programs[place])
            validate_together(programs)
    check(pipeline)


def _places(strategy: Strategy) -> frozenset[tuple[int, ...]]:
    """The places on a mesh whose programs are looked at."""
    sizes, largest = strategy.sizes, largest_place(strategy.cuts)
    if strategy.devices <= EVERY_RANK:
        return frozenset(itertools.product(*map(range, sizes)))
    return frozenset(itertools.product(*({0, n - 1, here} for n, here in zip(sizes, largest, strict=True))))


def validate_program(program: Program) -> None:
    """Refuse a program whose layouts do not fit together, that reads what is not there, or leaves something under way."""
    validate_dataflow(program.flow)
    sections, arrivals = program.sections, program.arrivals
    reduced = tuple(n for n in sections.get(REDUCE, ()) if n not in arrivals)
    walked = (sections[FORWARD], program.performed[BACKWARD], reduced, sections[UPDATE])
    if sorted(n for numbers in walked for n in numbers) != list(range(len(program.instructions))):
        raise _unsound(program, _misplaced(program, walked), "is not in exactly one section")
    resting = {*program.flow.rest.values(), *(s for s, slot in enumerate(program.slots) if slot.role == "resting")}
    gone: set[int] = set()
    there = _walk(program, walked[0], resting, resting, gone)
    there = _walk(program, walked[1], there | set(program.roots.values()), resting, gone)
    arrived = {slot for n in arrivals for slot in program.instructions[n].writes} if REDUCE in sections else set()
    there |= _walk(program, reduced, arrived, resting, gone)
    _walk(program, walked[3], there, resting, gone)


def _misplaced(program: Program, walked: Iterable[Sequence[int]]) -> int:
    """The first instruction that is in no section, or in several."""
    count = Counter(n for numbers in walked for n in numbers)
    return next(n for n in range(len(program.instructions)) if count[n] != 1)


def _walk(program: Program, numbers: Iterable[int], given: set[int], resting: set[int], gone: set[int]) -> set[int]:
    """Perform some instructions from the values that are there; gives those that are there in the end. ``gone``: values
    whose last use has been."""
    there, under_way = set(given), set[int]()
    for number in numbers:
        instruction = program.instructions[number]
        for slot in instruction.reads:
            if slot not in there and slot not in resting:
                why = "after its last use" if slot in gone else "before it is made"
                raise _unsound(program, number, f"reads {program.slots[slot].tensor or 'a flat tensor'} {why}")
        there.update(instruction.writes)
        there.difference_update(instruction.last)
        gone.update(instruction.last)
        if instruction.stream != COMPUTE:
            under_way.add(number)
        if instruction.kind in (Kind.AWAIT, Kind.REDUCE):  # a leg waits for the leg before
            under_way.difference_update(instruction.after)
    if under_way:
        raise _unsound(program, min(under_way), "is never awaited")
    return there


def validate_together(programs: Mapping[tuple[int, ...], Program]) -> None:
    """Refuse programs, by the places of their ranks, whose ranks do not meet in the same collectives in the same order."""
    groups: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], list[tuple[str, str, int]]]] = {}
    for place, program in programs.items():
        names = [name for name, _ in program.flow.place.axes]
        told: dict[str, list[tuple[str, str, int]]] = {name: [] for name in names}
        for instruction in program.instructions:
            if instruction.collective:
                told[instruction.stream].append((instruction.collective, instruction.name, instruction.bytes))
        for axis, name in enumerate(names):
            line = (name, (*place[:axis], *place[axis + 1 :]))
            groups.setdefault(line, {})[place] = told[name]
    for (name, _), members in groups.items():
        (first, expected), *others = members.items()
        for place, found in others:
            for one, other in itertools.zip_longest(expected, found):
                if one != other:
                    raise LoweringError(
                        f"the ranks at {first} and {place} do not meet along mesh axis {name!r}: "
                        f"{_collective(one)} against {_collective(other)}.",
                        "This is a defect of the builder; report the plan.",
                    )


def _collective(told: tuple[str, str, int] | None) -> str:
    return "nothing" if told is None else f"{told[0]} of {told[1]} ({told[2]} bytes)"


def _unsound(program: Program, number: int, why: str) -> LoweringError:
    instruction: Instruction = program.instructions[number]
    return LoweringError(
        f"instruction {number} ({instruction.kind} {instruction.name}, {instruction.phase}) of the rank at "
        f"{program.flow.place.coordinate} {why}.",
        "This is a defect of the builder; report the plan.",
    )


def validate_dataflow(flow: Dataflow) -> None:
    """Refuse a forward pass whose layouts do not fit together."""
    layouts: dict[int, tuple[Need, ...]] = {}
    for tensor, value in flow.rest.items():
        layouts[value] = _resting(flow, tensor)
    for node in flow.nodes:
        if isinstance(node, LayoutChange):
            layouts[node.result] = _changed(flow, node, layouts[node.source])
        else:
            _computed(flow, node, layouts)
    for value in flow.results:
        if any(isinstance(p, Partial) for p in layouts[value]):
            tensor = flow.values[value].tensor
            raise LoweringError(f"output {tensor!r} would be handed out unreduced.", "Make the plan again.")
    for buffer, value in flow.mutations:
        resting = flow.strategy.resting[buffer]
        if layouts[value] != resting:
            raise LoweringError(
                f"buffer {buffer!r} rests as {resting}, its new value comes as {layouts[value]}.",
                "Make the plan again.",
            )


def _resting(flow: Dataflow, tensor: str) -> tuple[Need, ...]:
    layout, shape = flow.strategy.resting[tensor], flow.graph.tensors[tensor].shape
    for placement in layout:
        if isinstance(placement, Partial) or (isinstance(placement, Shard) and placement.dim >= len(shape)):
            raise LoweringError(f"{tensor!r} of shape {shape} cannot rest as {layout}.", "Make the plan again.")
    return tuple(layout)


def _changed(flow: Dataflow, change: LayoutChange, source: tuple[Need, ...]) -> tuple[Need, ...]:
    wanted = flow.values[change.result].needs
    reached = _follow(flow, change, change.forward, source)
    if reached != wanted:
        raise _broken(flow, change, f"its steps lead to {reached}, not to {wanted}")
    handed_out = change.result in flow.results and not change.route.backward
    if flow.graph.tensors[flow.values[change.result].tensor].grad and not handed_out:
        returned = _follow(flow, change, change.backward, dual(reached))
        if returned != dual(source):
            raise _broken(flow, change, f"its gradient comes back as {returned}, not as {dual(source)}")
    return reached


def _follow(
    flow: Dataflow, change: LayoutChange, steps: Sequence[BoundStep], start: tuple[Need, ...]
) -> tuple[Need, ...]:
    layout = list(start)
    names = [name for name, _ in flow.place.axes]
    for step in steps:
        axis = names.index(step.line.group)
        here = layout[axis]
        after = _after(step, here)
        if after is None:
            raise _broken(flow, change, f"step {step.kind} along {step.line.group} does not apply to {tuple(layout)}")
        touched = {n.dim for n in (here, after) if isinstance(n, (Shard, Window))}
        others = layout[:axis] + layout[axis + 1 :]
        windowed = any(isinstance(n, Window) for n in (here, after))  # its regions are stated for a dim cut only here
        if any(
            isinstance(n, (Shard, Window)) and n.dim in touched for n in (others if windowed else layout[axis + 1 :])
        ):
            raise _broken(
                flow, change, f"step {step.kind} along {step.line.group} would break the nesting of {tuple(layout)}"
            )
        layout[axis] = after
    wanted = flow.values[change.result].needs
    return tuple(_as_window(need, want) for need, want in zip(layout, wanted, strict=True))


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


def _computed(flow: Dataflow, node: Compute, layouts: dict[int, tuple[Need, ...]]) -> None:
    op, tensors = node.op, flow.graph.tensors
    rules = analyse(op, tensors)
    needs = input_layouts(rules, node.split, len(op.inputs))
    for name, value, need in zip(op.inputs, node.inputs, needs, strict=True):
        if layouts[value] != need:
            what = "unreduced" if any(isinstance(n, Partial) for n in layouts[value]) else "wrongly laid out"
            raise LoweringError(
                f"{describe(op)}: its input {name!r} arrives {what}, as {layouts[value]}; its split needs {need}.",
                "Make the plan again.",
            )
    for made, layout in zip(node.outputs, output_layouts(rules, node.split, len(op.outputs)), strict=True):
        if made is None:
            continue
        tensor = flow.values[made].tensor
        if tensors[tensor].grad and any(isinstance(p, Partial) and p.reduce_op != "sum" for p in layout):
            raise LoweringError(
                f"{describe(op)}: {tensor!r} would be left as {layout}, which has no gradient.", "Split it otherwise."
            )
        layouts[made] = tuple(layout)
    _shapes(flow, node)


def _shapes(flow: Dataflow, node: Compute) -> None:
    """The local operator gives what the layouts promise. One that is whole and cannot be looked at is as it was captured."""
    if not node.footprint.known and any(node.split):
        given = tuple(flow.values[i].local.without_gradient for i in node.inputs)
        if why := why_not(node.call, given, flow.device, node.kernel):
            raise LoweringError(
                f"{describe(node.op)}: its piece does not run on local shapes ({why}).", "Split it otherwise."
            )
    for value, result in zip(node.outputs, node.footprint.results, strict=False):
        if value is None or result is None or not node.footprint.known:
            continue
        promised = flow.local_shape(flow.values[value].tensor, flow.values[value].needs)  # type: ignore[arg-type]
        if result.tensor.shape != promised:
            raise LoweringError(
                f"{describe(node.op)}: its piece gives {result.tensor.shape}, the layout promises {promised}.",
                "Split it otherwise.",
            )


def _broken(flow: Dataflow, change: LayoutChange, why: str) -> LoweringError:
    tensor = flow.values[change.result].tensor
    return LoweringError(f"the change of layout of {tensor!r} is broken: {why}.", "Make the plan again.")
