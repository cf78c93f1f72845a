"""``plan --like``: another engine's configuration as a plan beside ours, and what of it was not followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli._show import bytes_text, console, seconds_text, table

if TYPE_CHECKING:
    from shardwright.cluster import Cluster
    from shardwright.exchange import Configuration
    from shardwright.exchange.configuration import Remark
    from shardwright.exchange.planning import Followed
    from shardwright.graph import Graph
    from shardwright.planner import Options
    from shardwright.plans import Plan
    from shardwright.reports.diff import Difference

LISTED = 12
"""Keys that decide nothing a plan decides are named up to so many; ``--json`` has all."""


class Like:
    """A configuration that was read, its plan, and, where some of it is kept, the plan that changes lead to."""

    def __init__(self, told: Configuration, keep: Sequence[str]) -> None:
        self.told, self.keep = told, keep
        self.theirs: Followed | None = None
        self.changed: Followed | None = None
        self.changes: tuple[Remark, ...] = ()
        self.differences: Difference | None = None

    def follow(
        self, graph: Graph, cluster: Cluster, options: Options, reference: str, say: Callable[[str], None]
    ) -> None:
        """Their plan, and with ``keep`` what it becomes when only what pays is changed."""
        from shardwright.exchange.changing import improve
        from shardwright.exchange.planning import plan_like

        self.theirs = plan_like(graph, cluster, self.told, options, progress=say, reference=reference)
        if self.keep:
            better, self.changes = improve(
                graph, cluster, self.theirs.configuration, options, keep=self.keep, progress=say
            )
            if self.changes:
                self.changed = plan_like(graph, cluster, better, options, progress=say, reference=reference)

    def compare(self, ours: Plan, graph: Graph) -> None:
        """Which decisions of ours make the difference."""
        from shardwright.reports.diff import compare

        if self.theirs is not None:
            self.differences = compare(self.theirs.plan, ours, graph)

    def rows(self, ours: Plan) -> list[list[str]]:
        """Lines of the table: theirs, theirs with changes, ours."""
        from shardwright.cli._show import mesh_text

        named = [(self.told.engine, self.theirs), (f"{self.told.engine}, changed", self.changed)]
        plans = [(name, followed.plan) for name, followed in named if followed is not None]
        first = self.theirs.plan.prediction.step_seconds if self.theirs else 0.0
        found = []
        for name, plan in [*plans, ("found", ours)]:
            p, stages = plan.prediction, len(plan.stages)
            shape = mesh_text([("stage", stages)] * (stages > 1) + [*plan.stages[0].strategy.axes])
            ratio = f"{p.step_seconds / first:.2f}×" if first else "–"
            row = [name, shape, seconds_text(p.step_seconds), ratio, bytes_text(p.memory_bytes)]
            found.append([*row, seconds_text(p.exposed_seconds), "yes" if p.fits else "no"])
        return found

    def document(self) -> dict[str, Any]:
        """What ``--json`` says of it."""
        theirs, changed = self.theirs, self.changed
        return {
            "configuration": self.told.as_dict(),
            "followed": theirs and theirs.configuration.decisions(),
            "prediction": theirs and vars(theirs.plan.prediction),
            "otherwise": [vars(r) for r in theirs.remarks] if theirs else [],
            "changes": [vars(r) for r in self.changes],
            "changed": changed
            and {"configuration": changed.configuration.decisions(), "prediction": vars(changed.plan.prediction)},
            "differences": self.differences and self.differences.as_dict()["decisions"],
        }


def save_beside(like: Like, output: Path, **about: Any) -> list[Path]:
    """Their plan, and the changed one, beside ours: ``plan-like.json``, ``plan-changed.json``."""
    from dataclasses import replace

    written = []
    for name, followed in (("like", like.theirs), ("changed", like.changed)):
        if followed is not None:
            path = output.with_name(f"{output.stem}-{name}.json")
            replace(followed.plan, **about).save(path)
            written.append(path)
    return written


def print_remarks(told: Configuration, others: Sequence[Remark] = ()) -> None:
    """What of a file has no meaning for a plan, by what it is."""
    for title, remarks in (
        ("Changes speed or memory there, and is not in the plan", told.unsupported),
        ("The plan does otherwise", others),
        ("Not understood", told.unknown),
    ):
        if remarks:
            console.print(f"{title}:")
            for remark in remarks:
                console.print(f"  {remark}", markup=False, highlight=False)
    if told.elsewhere:
        names = [remark.key for remark in told.elsewhere]
        more = f" and {len(names) - LISTED} more (--json)" if len(names) > LISTED else ""
        console.print(f"Decides nothing that a plan decides: {', '.join(names[:LISTED])}{more}.", markup=False)


def print_like(like: Like, ours: Plan) -> None:
    """Both in one table, the decisions that make the difference, and what was not followed."""
    from shardwright.reports.diff_page import headline

    if like.theirs is None:
        return
    source = like.told.source or like.told.engine
    console.print(f"{source}: {like.theirs.configuration.summary()}", markup=False, highlight=False)
    table(
        f"{source} beside what was found",
        ["plan", "mesh", "step", "ratio", "memory", "exposed", "fits"],
        like.rows(ours),
        spare=("mesh",),
        caption=headline(like.differences) if like.differences else "",
    )
    for change in like.changes:
        console.print(f"changed: {change.key}: {change.value}, {change.why}", markup=False, highlight=False)
    if like.keep and not like.changes:
        console.print("No single change of what may change pays.")
    print_remarks(like.told, like.theirs.remarks)
