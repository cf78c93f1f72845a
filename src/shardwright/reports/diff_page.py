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
            seconds_text(d.first_seconds),
            seconds_text(d.second_seconds),
            _bar(d.difference / most) + data(f"difference {d.what}", d.difference, signed(d.difference)),
            escape(parts_text(d)),
        ]
        for d in found.decisions
    ]
    columns = ["decision", names[0], names[1], f"seconds in {names[0]}", f"in {names[1]}", "difference", "made of"]
    content = {
        "glance": f'<div class="cards">{"".join(cards)}</div><p class="hint">{escape(headline(found))}</p>',
        "decisions": '<p class="hint">Every instant of a step belongs to one event of the chain that decides it, and every '
        "event to a decision (of several groups of ranks: the one that ends the step, whose bubbles are a decision too): "
        "the differences add up to that of the steps.</p>"
        + table("Decisions, the largest difference first", columns, rows),
        "timeline": asset("timeline.html"),
    }
    body = "".join(
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>{content[name]}</section>'
        for name, title in SECTIONS.items()
    )
    carried = {"plans": [{"name": n, "step": packed_plan(side)} for n, side in zip(names, found.steps, strict=True)]}
    title = f"{names[0]} and {names[1]}: {found.first.model or 'model'} on {found.first.cluster.name}"
    return document(title, "two plans side by side", SECTIONS, body, carried)


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
