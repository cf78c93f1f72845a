"""A plan in a notebook: the glance, in a frame of its own so that neither page's styles touch the other's."""

from __future__ import annotations

from shardwright.errors import ShardwrightError
from shardwright.plans import Plan
from shardwright.reports.glance import glance, work_of
from shardwright.reports.html import asset, escape, table

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
    notes = table("Notes", ["note"], [[escape(note)] for note in plan.notes]) if plan.notes else ""
    inside = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>plan</title><style>{asset("page.css")}'
        "body { font-size: 14px; } main { padding: 0.5rem; }</style></head><body><main>"
        f"<h2>{escape(plan.model or 'model')} on {escape(plan.cluster.name)}</h2>"
        f'<p class="hint">{escape(plan.shape)} · prices: {escape(plan.calibration)}</p>'
        f"{glance(plan, work)}{notes}</main></body></html>"
    )
    height = REST + ROW * len(plan.candidates) + 60 * bool(plan.notes)
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe title="Shardwright plan" style="{style}" srcdoc="{escape(inside, quote=True)}"></iframe>'
