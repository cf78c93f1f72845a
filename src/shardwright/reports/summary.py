"""A plan at a glance: its step against every baseline and the bound, its memory against the limit, its rate and its price.

All of it is plain HTML without a script, so that it reads anywhere: in the page before anything has run, and in a notebook,
in a frame of its own so that neither page's styles touch the other's.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.plans import Candidate, Plan
from shardwright.plans.proof_text import bounded_text, proof_text, quality_text, warnings_text
from shardwright.reports.html import asset, card, data, escape, table
from shardwright.search.limits import limit_of
from shardwright.units import bytes_text, seconds_text


@dataclass(frozen=True)
class StepWork:
    """What one step works through: ``count`` tokens or samples."""

    unit: str
    count: int


def work_of(graph: Graph) -> StepWork | None:
    """Tokens where an input is a table of integers (batch by sequence), else samples along dim 0 of the first input."""
    shapes = [graph.tensors[i.tensor] for i in graph.inputs if i.tensor is not None]
    for tensor in shapes:
        if len(tensor.shape) == 2 and "int" in tensor.dtype:
            return StepWork("tokens", tensor.elements)
    return next((StepWork("samples", tensor.shape[0]) for tensor in shapes if tensor.shape), None)


def candidate_name(candidate: Candidate) -> str:
    """``found`` for the answer of the search, a baseline's own name otherwise."""
    return "found" if candidate.name == "auto" else candidate.name


def rate_text(count: float) -> str:
    """Large counts in words.

    >>> rate_text(1_250_000.0)
    '1.25 million'
    """
    for scale, unit in ((1e9, " billion"), (1e6, " million")):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:,.0f}"


def summary(plan: Plan, work: StepWork | None, price: float | None = None) -> str:
    """Cards, and the race between the plan and its baselines. ``price`` is that of one device for an hour."""
    p, proof = plan.prediction, plan.proof
    limit = limit_of(plan.meshes[0].device, plan.asked.memory_limit)
    cards = [
        card(
            "one step (simulated)",
            data("step_seconds", p.step_seconds, seconds_text(p.step_seconds)),
            f"{data('exposed_seconds', p.exposed_seconds, seconds_text(p.exposed_seconds))} of it is communication that "
            "nothing hides",
        ),
        card(
            "memory of one device",
            data("memory_bytes", p.memory_bytes, bytes_text(p.memory_bytes)),
            f"{100 * p.memory_bytes / limit:.0f} % of the {bytes_text(limit)} allowed",
        ),
    ]
    if work is not None:
        per_second = work.count / p.step_seconds
        below = f"{work.count:,} {work.unit} a step on {plan.devices} devices"
        cards.append(card(f"{work.unit} a second", data("rate", per_second, rate_text(per_second)), below))
        if price is not None:
            cost = price * plan.devices * p.step_seconds / 3600 / work.count * 1e6
            below = f"at {price:g} for a device and hour"
            cards.append(card(f"cost of a million {work.unit}", data("cost", cost, f"{cost:.3g}"), below))
    if len(plan.stages) > 1:
        busy = sum(stage.prediction.busy_seconds for stage in plan.stages if stage.prediction is not None)
        idle = 1.0 - busy / (p.step_seconds * len(plan.stages)) if p.step_seconds else 0.0
        below = f"of the time of {len(plan.stages)} stages, with {plan.microbatches} micro-batches"
        cards.append(card("bubbles", f"{100 * max(idle, 0.0):.1f} %", below))
    what = bounded_text(proof)
    below = f"{what}, against the plans named below; " if what else ""
    cards.append(
        card("how good it provably is", escape(quality_text(plan)), f"{below}planned in {proof.seconds:.1f} s")
    )
    return f'<div class="cards">{"".join(cards)}</div>{race(plan)}'


def race(plan: Plan) -> str:
    """Bars of the step time of every candidate; the hatched end is exposed communication, the dashed line the bound."""
    told = [c.prediction.step_seconds for c in plan.candidates if c.prediction is not None]
    longest = max([plan.prediction.step_seconds, plan.proof.sum_bound, plan.proof.step_bound, *told])
    rows = []
    for candidate in plan.candidates:
        name, p = candidate_name(candidate), candidate.prediction
        ours = is_ours(plan, candidate)
        who = f'<div class="who{" ours" if ours else ""}">{escape(name)}</div>'
        if p is None:
            rows.append(f'<div class="line">{who}<div class="note alone">{escape(candidate.note)}</div></div>')
            continue
        width = 100 * p.step_seconds / longest
        exposed = 100 * min(1.0, p.exposed_seconds / p.step_seconds) if p.step_seconds else 0.0
        look = "" if ours else " over" if not p.fits else " other"
        ratio = p.step_seconds / plan.prediction.step_seconds
        said = f"{seconds_text(p.step_seconds)}, {ratio:.2f} ×, {bytes_text(p.memory_bytes)}"
        said += "" if p.fits else ", does not fit"
        said += "" if candidate.simulated else ", by sums: not simulated, so it may not fit"
        inside = f'<span class="open" style="left:{100 - exposed:.2f}%;width:{exposed:.2f}%"></span>'
        bar = f'<span class="filled{look}" style="width:{width:.2f}%">{inside}</span>'
        rows.append(_line(who, bar, data("candidate " + name, p.step_seconds, said)))
    rows.append(_bound(plan, longest))
    said = "Length is the simulated step; its hatched end is communication that nothing hides."
    return f'<div class="race">{"".join(rows)}</div><p class="hint">{said} {escape(proof_text(plan))}</p>'


def _line(who: str, bar: str, note: str) -> str:
    return f'<div class="line">{who}<div class="lane">{bar}</div><div class="note">{note}</div></div>'


def is_ours(plan: Plan, candidate: Candidate) -> bool:
    """Whether a row of the comparison is the plan itself: the first with its prediction."""
    own = (row for row in plan.candidates if row.simulated and row.prediction == plan.prediction)
    return candidate is next(own, None)


def _bound(plan: Plan, longest: float) -> str:
    """The proved bounds as lines of the race: on the step, and on the sum of seconds that the search minimises."""
    proof = plan.proof
    lines = [
        ("proved: no step is shorter", "step_bound", proof.step_bound),
        ("proved: no sum is smaller", "sum_bound", proof.sum_bound),
    ]
    return "".join(
        _line(
            f'<div class="who">{who}</div>',
            f'<span class="bound" style="width:{100 * bound / longest:.2f}%"></span>',
            data(name, bound, seconds_text(bound)),
        )
        for who, name, bound in lines
        if bound
    )


def memory_gauge(breakdown: dict[str, int], limit: float) -> str:
    """What is alive at the peak against what the device has."""
    parts = "".join(
        f'<span style="width:{100 * size / max(limit, sum(breakdown.values())):.3f}%;'
        f'background:var(--kind-{kind.replace(" ", "-").replace("optimizer", "optimizer")})" title="{escape(kind)}"></span>'
        for kind, size in sorted(breakdown.items(), key=lambda item: -item[1])
    )
    said = ", ".join(
        f"{kind} {bytes_text(size)}" for kind, size in sorted(breakdown.items(), key=lambda item: -item[1])
    )
    return f'<div class="gauge" role="img" aria-label="Alive at the peak: {escape(said)}">{parts}</div>'


ROW, REST = 32, 560
"""Points a line of the race takes, and everything else."""


def notebook_html(plan: Plan) -> str:
    """What a notebook shows for a plan; ``plan.save`` and ``shardwright report`` give the whole page.

    >>> from IPython.display import HTML
    >>> HTML(notebook_html(plan))
    """
    try:
        work = work_of(plan.graph())
    except ShardwrightError:
        work = None  # a plan that holds no graph knows no tokens
    said = [*plan.notes, *warnings_text(plan)]
    notes = table("Notes", ["note"], [[escape(note)] for note in said]) if said else ""
    inside = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>plan</title><style>{asset("page.css")}'
        "body { font-size: 14px; } main { padding: 0.5rem; }</style></head><body><main>"
        f"<h2>{escape(plan.model or 'model')} on {escape(plan.cluster.name)}</h2>"
        f'<p class="hint">{escape(plan.shape)} · prices: {escape(plan.calibration)}</p>'
        f"{summary(plan, work)}{notes}</main></body></html>"
    )
    height = REST + ROW * len(plan.candidates) + 60 * bool(said)
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe title="Shardwright plan" style="{style}" srcdoc="{escape(inside, quote=True)}"></iframe>'
