"""A plan as one picture: how its candidates compare, and what every operator of the first block cuts on each mesh axis.

Plain SVG, written by hand: no dependency, readable in any browser and on any README page.
"""

from __future__ import annotations

from html import escape

from shardwright.graph import Graph
from shardwright.graph.repeats import representatives
from shardwright.operators.rules import OpRules
from shardwright.plans import Plan
from shardwright.search.labels import Labels

COLOURS = {
    "batch": "#4477aa",
    "sequence": "#66ccee",
    "spatial": "#228833",
    "features": "#ee6677",
    "sum": "#ccbb44",
    "open sum": "#aa3377",
    "whole": "#e8e8e8",
}
MEANING = {
    "batch": "cuts the batch",
    "sequence": "cuts the sequence",
    "spatial": "cuts the picture",
    "features": "cuts features or heads",
    "sum": "cuts a reduction",
    "open sum": "passes an unreduced sum",
    "whole": "whole on every rank",
}
WIDTH, LEFT, ROW, BAR = 1120, 150, 22, 18


def picture(plan: Plan, graph: Graph, rules: dict[str, OpRules], labels: Labels) -> str:
    """The plan as an SVG document."""
    parts: list[str] = []
    bottom = _candidates(plan, parts, 40)
    bottom = _strips(plan, graph, rules, labels, parts, bottom + 40)
    bottom = _legend(parts, bottom + 24)
    title = f"{plan.model or 'model'} on {plan.cluster.name}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{_text(12, 22, title, size=16, weight="bold")}'
    )
    return head + "".join(parts) + "</svg>\n"


def _text(x: float, y: float, text: str, size: int = 12, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> str:
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} fill="{colour}" stroke="white">{inside}</rect>'


def _candidates(plan: Plan, parts: list[str], top: int) -> int:
    """Bars of simulated step time, memory beside them; what does not fit is hollow."""
    shown = [c for c in plan.candidates if c.prediction is not None]
    longest = max(c.prediction.step_seconds for c in shown if c.prediction is not None)
    for candidate in shown:
        p = candidate.prediction
        assert p is not None  # filtered above
        name = "found" if candidate.name == plan.search else candidate.name
        width = max(2.0, 520 * p.step_seconds / longest)
        parts.append(_text(LEFT - 8, top + 13, name, anchor="end", weight="bold" if name == "found" else "normal"))
        parts.append(_box(LEFT, top, width, BAR, "#4477aa" if p.fits else "#dddddd"))
        exposed = width * min(1.0, p.exposed_seconds / p.step_seconds)
        parts.append(_box(LEFT + width - exposed, top, exposed, BAR, "#ee6677" if p.fits else "#eecccc"))
        note = f"{1e3 * p.step_seconds:.1f} ms, {p.memory_bytes / 1e9:.1f} GB" + ("" if p.fits else ", does not fit")
        parts.append(_text(LEFT + width + 8, top + 13, note))
        top += ROW
    parts.append(_text(LEFT, top + 12, "simulated step; red is communication that nothing hides", size=11))
    return top + 16


def _strips(plan: Plan, graph: Graph, rules: dict[str, OpRules], labels: Labels, parts: list[str], top: int) -> int:
    """One strip per mesh axis, one box per operator; repeated blocks are drawn once."""
    standing = representatives(graph)
    ops = [op for op in graph.ops if standing[op.name] == op.name and rules[op.name].kind not in ("view", "creation")]
    repeats = len(graph.ops) / max(1, len(set(standing.values())))
    width = (WIDTH - LEFT - 60) / max(1, len(ops))
    parts.append(_text(LEFT, top - 8, f"operators in order, repeated blocks drawn once ({repeats:.1f} fold)", size=11))
    for axis, (name, size) in enumerate(plan.strategy.axes):
        parts.append(_text(LEFT - 8, top + 15, f"{name} × {size}", anchor="end"))
        for i, op in enumerate(ops):
            what = _kind(plan.strategy.splits[op.name][axis], rules[op.name], labels.get(op.name, {}))
            hint = f"{op.name} ({op.target}) in {op.module or 'the model'}: {MEANING[what]}"
            parts.append(_box(LEFT + i * width, top, width, ROW, COLOURS[what], hint))
        top += ROW + 4
    if width < 10:
        return top
    for i, op in enumerate(ops):
        x, name = LEFT + (i + 0.5) * width, op.target.split(".")[1]
        parts.append(f'<text transform="translate({x:.1f} {top + 6}) rotate(35)" font-size="10">{escape(name)}</text>')
    return top + 16 + int(3.2 * max(len(op.target.split(".")[1]) for op in ops))


def _kind(loop: str | None, rules: OpRules, labels: dict[str, str] | object) -> str:
    if loop is None:
        return "whole"
    if not rules.by_name[loop].divides:
        return "open sum"
    label = labels.get(loop, "") if isinstance(labels, dict) else ""
    if label:
        return label
    reduces = any(type(out).__name__ == "Partial" for out in rules.by_name[loop].outputs)
    return "sum" if reduces else "features"


def _legend(parts: list[str], top: int) -> int:
    x = float(LEFT)
    for what, meaning in MEANING.items():
        parts.append(_box(x, top, 12, 12, COLOURS[what]))
        parts.append(_text(x + 16, top + 11, meaning, size=11))
        x += 24 + 6.0 * len(meaning)
    return top + 28
