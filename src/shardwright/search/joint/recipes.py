"""The recipes for pipelines as restrictions of the same space, by the same prices and the same timing.

``megatron-3d``: equal runs of blocks (of a general graph: stages of about equal work), all stages on meshes of the same
sizes with the same strategy, every factorisation tried (on unlike devices too: it does not know that they are);
``gpipe``: the same with all forward passes first; ``pipedream``: free cuts, stages replicated, nothing recomputed; ``alpa``:
free cuts, the fastest strategy of every mesh, all blocks recomputed or none (two levels, solved one after the other).
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.errors import ProblemError
from shardwright.search.joint.found import JointPlan
from shardwright.search.joint.space import Row, Space
from shardwright.search.joint.timed import Run, Timed

BASELINES = ("megatron-3d", "gpipe", "pipedream", "alpa")


def recipe(space: Space, name: str) -> JointPlan | None:
    """The best plan of a recipe in a space; nothing where none fits.

    >>> recipe(space, "megatron-3d").step_seconds  # doctest: +SKIP
    """
    rows = [row for row in space.rows if not row.price.strategy.shares]  # all of them deal in equal parts
    if name == "pipedream":
        alone = [row for row in rows if row.price.name == "data-parallel" or row.price.devices == 1]
        return space.best([replace(row, price=row.price.without_recomputing()) for row in alone])
    if name == "alpa":
        fastest = [row for row in rows if row.price.name == "auto" and row.price.fastest]
        plain = [replace(row, price=row.price.without_recomputing()) for row in fastest]
        again = [replace(row, price=row.price.recomputing_everything()) for row in fastest]
        return space.best([*plain, *again])
    if name not in BASELINES:
        raise ProblemError(f"there is no pipeline baseline {name!r}.", f"Known: {', '.join(BASELINES)}.")
    plans = []
    for count in (count for count in range(1, space.most + 1) if space.devices % count == 0):
        units, cuts = space.devices // count, space.cutting.even(count)
        if cuts is None:
            continue
        runs = [Run(cuts[k], cuts[k + 1], units) for k in range(count)]
        alike_rows: dict[tuple[object, ...], list[Row]] = {}
        for row in rows:
            if row.units == units:
                alike_rows.setdefault((row.price.mesh.names, row.price.name), []).append(row)
        for alike in alike_rows.values():
            plans.append(Timed(space, alike, "gpipe" if name == "gpipe" else "1f1b").plan(runs))
    return min(filter(None, plans), key=lambda plan: plan.step_seconds, default=None)
