"""Two plans side by side as one offline page: what differs, what each difference costs, both timelines on one clock."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.reports.diff import Decision, Difference
from shardwright.reports.html import asset, card, data, escape, table
from shardwright.reports.page import document
from shardwright.reports.page_data import packed_plan
from shardwright.reports.steps import PlanStep
from shardwright.units import bytes_text, seconds_text

SECTIONS = {"glance": "At a glance", "decisions": "What differs", "timeline": "Both timelines"}


def diff_page(found: Difference, names: Sequence[str]) -> str:
    """The page of a comparison; ``names`` are what to call the two plans."""
    one, other = found.steps
    cards = [
        card(name, data(f"step {place}", step.timeline.seconds, seconds_text(step.timeline.seconds)), _under(step))
        for place, (name, step) in enumerate(zip(names, found.steps, strict=True))
    ]
    ratio = other.timeline.seconds / one.timeline.seconds if one.timeline.seconds else 0.0
    cards.append(card("second against first", f"{ratio:.3g} ×", signed(found.seconds)))
    most = max((abs(d.difference) for d in found.decisions), default=1.0) or 1.0
    rows = [
        [
            escape(d.what),
            escape(d.first),
            escape(d.second) if d.differs else "the same",
            *map(escape, cost_texts(d)),
            _bar(d.difference / most) + data(f"difference {d.what}", d.difference, signed(d.difference)),
            escape(parts_text(d)),
        ]
        for d in found.decisions
    ]
    columns = ["decision", names[0], names[1], *COSTS, "difference", "made of"]
    content = {
        "glance": f'<div class="cards">{"".join(cards)}</div><p class="hint">{escape(headline(found))}</p>',
        "decisions": f'<p class="hint">{LEGEND} Of several groups of ranks it is the one that ends the step; what that '
        "waits for others is a decision too.</p>" + table("Decisions, the largest difference first", columns, rows),
        "timeline": asset("timeline.html"),
    }
    body = "".join(
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>{content[name]}</section>'
        for name, title in SECTIONS.items()
    )
    carried = {"plans": [{"name": n, "step": packed_plan(side)} for n, side in zip(names, found.steps, strict=True)]}
    title = f"{names[0]} and {names[1]}: {found.first.model or 'model'} on {found.first.cluster.name}"
    return document(title, "two plans side by side", SECTIONS, body, carried)


COSTS = ("computing", "exposed", "hidden", "idle")
LEGEND = (
    "Seconds in the first and in the second plan: computing; sending or receiving while nothing computes (exposed); the "
    "same under computation (hidden), which costs nothing; idle before it. All but the hidden ones add up to the step."
)


def cost_texts(decision: Decision) -> list[str]:
    """What it costs in both plans, by :data:`COSTS`: ``12 → 14.5 ms``, one figure where it is the same."""
    pairs = [(getattr(decision.first_cost, kind), getattr(decision.second_cost, kind)) for kind in COSTS]
    return [_both(seconds_text(a) if a else "0", seconds_text(b) if b else "0") for a, b in pairs]


def _both(first: str, second: str) -> str:
    """Two figures, their unit once where it is the same.

    >>> _both("12 ms", "14.5 ms"), _both("0", "3 µs"), _both("2 s", "2 s")
    ('12 → 14.5 ms', '0 → 3 µs', '2 s')
    """
    if first == second:
        return "–" if first == "0" else first
    number, _, unit = first.partition(" ")
    return f"{number if second.endswith(' ' + unit) else first} → {second}"


def _bar(share: float) -> str:
    look = "bar worse" if share > 0 else "bar"
    return f'<span class="{look}" style="width:{55 * abs(share):.1f}%"></span>'


def signed(seconds: float) -> str:
    """Seconds with their sign.

    >>> signed(-0.002)
    '−2 ms'
    """
    return ("−" if seconds < 0 else "+") + seconds_text(abs(seconds))


def parts_text(decision: Decision) -> str:
    """What a difference is made of, the two largest parts."""
    parts = sorted(decision.parts.items(), key=lambda item: -abs(item[1]))[:2]
    return ", ".join(f"{name} {signed(seconds)}" for name, seconds in parts if seconds)


def headline(found: Difference) -> str:
    """The three decisions that make the difference and what is left of it, in one sentence."""
    telling = [d for d in found.decisions if d.differs][:3]
    if not telling:
        return "Both plans decide the same."
    said = "; ".join(f"{d.what} {signed(d.difference)}" for d in telling)
    rest = signed(found.seconds - sum(d.difference for d in telling))
    return f"The decisions that make the difference: {said}; everything else {rest}; together {signed(found.seconds)}."


def _under(side: PlanStep) -> str:
    return f"{escape(side.shape)}, {bytes_text(side.timeline.peak_bytes)} a device"
