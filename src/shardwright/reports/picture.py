"""A plan as one picture for a paper: how its candidates compare, and what every operator cuts on each mesh axis.

Every candidate has its line, also those that do not fit or do not apply; repeated blocks are drawn once; modules, not
operators, are named below, as many as there is room for; a colour means one thing.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.graph import Graph, Op
from shardwright.operators.rules import OpRules
from shardwright.planner import describe_graph
from shardwright.plans import Candidate, Plan
from shardwright.reports.cuts import COLOURS, MEANING, cut_of
from shardwright.reports.drawing import Box, Drawing, Words, text_width
from shardwright.reports.splitting import standing
from shardwright.reports.steps import PlanStep, several_passes, stage_plans
from shardwright.reports.summary import candidate_name, is_ours
from shardwright.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwright.schedules.picture import NAMES
from shardwright.search.labels import Labels
from shardwright.units import bytes_text, seconds_text

WIDTH, LEFT, RIGHT, ROW, BAR = 1120.0, 150.0, 24.0, 24.0, 18.0
OURS, OPEN, THEIRS, THEIRS_OPEN, OVER = "#33415c", "#9aa8c4", "#8a97a8", "#cfd6df", "#f1f3f6"
SOFT = "#4d5765"
PASSES = {FORWARD: "#4477aa", BACKWARD: "#aa3377", INPUT: "#aa3377", WEIGHT: "#997700", "close": "#ccbb44"}
PASS_WORDS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "gradients of weights", "close": "sums and update"}
LEAST = 13.0
"""Points between the names of neighbouring modules, so that none is written over another."""


def picture(plan: Plan, graph: Graph) -> Drawing:
    """The plan as a drawing: ``.svg()`` or ``.pdf()``; with its passes where there are several, and the splits of
    the first stage."""
    items: list[Box | Words] = [Words(12, 24, f"{plan.model or 'model'} on {plan.cluster.name}", 16, bold=True)]
    bottom = _candidates(plan, items, 42)
    if several_passes(plan):
        bottom = _passes(PlanStep.of(plan, graph), items, bottom + 30)
    one, part = stage_plans(plan, graph)[0]
    described = describe_graph(part)
    if len(plan.stages) > 1:
        items.append(Words(LEFT, bottom + 26, "How the first stage is split", 12, bold=True))
        bottom += 10
    bottom = _strips(one, part, described.rules, described.labels, items, bottom + 40)
    bottom = _legend(items, bottom + 22)
    return Drawing(WIDTH, bottom, tuple(items))


def _candidates(plan: Plan, items: list[Box | Words], top: float) -> float:
    """A bar per candidate, paler where communication is exposed; outlined where it does not fit."""
    told = [c.prediction.step_seconds for c in plan.candidates if c.prediction is not None]
    longest = max([plan.prediction.step_seconds, *told])
    for candidate in plan.candidates:
        _candidate(plan, candidate, items, top, 560 / longest if longest else 0.0)
        top += ROW
    words = "simulated step; the pale end is communication that nothing hides, an outline does not fit the memory"
    items.append(Words(LEFT, top + 10, words, 11, colour=SOFT))
    return top + 14


def _passes(step: PlanStep, items: list[Box | Words], top: float) -> float:
    """A line per group of ranks: its passes in time, with the numbers of micro-batches where there is room."""
    timeline = step.timeline
    timing, scale = timeline.timing, (WIDTH - LEFT - RIGHT) / timeline.seconds
    items.append(
        Words(LEFT, top, "Passes of every kind of rank; the number is the micro-batch, gaps are bubbles", 12, bold=True)
    )
    top += 8
    for group, order in enumerate(timing.schedule.orders):
        items.append(Words(LEFT - 10, top + 15, _fitting(step.title(group), 11, LEFT - 14), 11, anchor="end"))
        items.append(Box(LEFT, top, WIDTH - LEFT - RIGHT, 20, OVER))
        for action, start, end in zip(order, timing.starts[group], timing.ends[group], strict=True):
            left, width = LEFT + scale * float(start), max(scale * float(end - start) - 0.5, 0.3)
            hint = f"{NAMES[action.kind]} of micro-batch {action.microbatch}, stage {action.stage}"
            items.append(Box(left, top, width, 20, PASSES[action.kind], hint))
            if width > text_width(str(action.microbatch), 9) + 2:
                items.append(
                    Words(left + width / 2, top + 14, str(action.microbatch), 9, anchor="middle", colour="#ffffff")
                )
        closing = timeline.played.closing[group]
        width = max(scale * (closing.end - closing.start), 0.5)
        items.append(Box(LEFT + scale * closing.start, top, width, 20, PASSES["close"], "sums and update"))
        top += ROW
    x = LEFT
    for kind, text in PASS_WORDS.items():
        items += [Box(x, top + 4, 12, 12, PASSES[kind]), Words(x + 16, top + 14, text, 11)]
        x += 40 + text_width(text, 11)
    return top + 26


def _candidate(plan: Plan, candidate: Candidate, items: list[Box | Words], top: float, scale: float) -> None:
    ours, p = is_ours(plan, candidate), candidate.prediction
    items.append(
        Words(LEFT - 10, top + 13, _fitting(candidate_name(candidate), 12, LEFT - 12), bold=ours, anchor="end")
    )
    if p is None:
        room = WIDTH - LEFT - RIGHT
        items.append(Words(LEFT, top + 13, _fitting(f"no plan: {candidate.note}", 12, room), colour=SOFT))
        return
    width = max(2.0, scale * p.step_seconds)
    exposed = width * min(1.0, p.exposed_seconds / p.step_seconds) if p.step_seconds else 0.0
    full, pale = (OURS, OPEN) if ours else (THEIRS, THEIRS_OPEN)
    if not p.fits:
        items.append(Box(LEFT, top, width, BAR, OVER, outline=THEIRS))
    else:
        items.append(Box(LEFT, top, width - exposed, BAR, full))
        items.append(Box(LEFT + width - exposed, top, exposed, BAR, pale))
    note = f"{seconds_text(p.step_seconds)}, {bytes_text(p.memory_bytes)}" + ("" if p.fits else ", does not fit")
    note += "" if candidate.simulated else ", by sums"
    items.append(Words(LEFT + width + 8, top + 13, note))


def _strips(
    plan: Plan, graph: Graph, rules: Mapping[str, OpRules], labels: Labels, items: list[Box | Words], top: float
) -> float:
    """One strip per mesh axis, one box per operator; repeated blocks are drawn once."""
    shown, times = standing(plan, graph)
    ops = [op for op in shown if rules[op.name].kind not in ("view", "creation")]
    width = (WIDTH - LEFT - RIGHT) / max(1, len(ops))
    most = max((times[op.name] for op in ops), default=1)
    said = f"operators in order{f', the block that repeats {most} times drawn once' if most > 1 else ''}"
    items.append(Words(LEFT, top - 8, said, 11, colour=SOFT))
    for axis, (name, size) in enumerate(plan.stages[0].strategy.axes):
        items.append(Words(LEFT - 10, top + 15, f"{name} × {size}", anchor="end"))
        for i, op in enumerate(ops):
            cut = cut_of(plan.stages[0].strategy.splits[op.name][axis], rules[op.name], labels.get(op.name, {}))
            hint = f"{op.name} ({op.target}) in {op.module or 'the model'}: {MEANING[cut]}"
            items.append(Box(LEFT + i * width, top, max(width - 0.6, 0.4), 20, COLOURS[cut], hint))
        top += ROW
    return top + _names(ops, width, items, top)


def _names(ops: list[Op], width: float, items: list[Box | Words], top: float) -> float:
    """Modules below the strips, turned, each where its operators begin; names that would collide are left out."""
    taken, longest = -LEAST, 0.0
    last = None
    for i, op in enumerate(ops):
        module = op.module or "(model)"
        x = LEFT + (i + 0.5) * width
        if module == last or x - taken < LEAST:
            continue
        name = _fitting(module, 10, 150)
        items.append(Words(x + 4, top + 10, name, 10, anchor="end", turn=-40, colour=SOFT))
        taken, last, longest = x, module, max(longest, text_width(name, 10))
    return 18 + 0.65 * longest


def _fitting(text: str, size: float, room: float) -> str:
    if text_width(text, size) <= room:
        return text
    while text and text_width(text + "…", size) > room:
        text = text[:-1]
    return text + "…"


def _legend(items: list[Box | Words], top: float) -> float:
    x = LEFT
    for cut, meaning in MEANING.items():
        needed = 22 + text_width(meaning, 11)
        if x + needed > WIDTH - RIGHT:
            x, top = LEFT, top + 18
        items += [Box(x, top, 12, 12, COLOURS[cut]), Words(x + 16, top + 10, meaning, 11)]
        x += needed + 12
    return top + 26
