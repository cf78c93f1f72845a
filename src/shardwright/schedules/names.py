"""The known schedules by name, each for any number of stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.errors import ProblemError
from shardwright.schedules.classic import breadth_first, gpipe, interleaved_one_f_one_b, one_f_one_b
from shardwright.schedules.schedule import Schedule, check_size
from shardwright.schedules.v_shapes import dualpipe_v, v_half, v_min, zb_v
from shardwright.schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class Recipe:
    """How a known schedule is made: ``make(devices, microbatches, stages)`` on devices in a shape."""

    shape: str
    stages_per_device: int | None  # None: any number
    make: Callable[[int, int, int], Schedule]


def _single(make: Callable[[int, int], Schedule]) -> Recipe:
    return Recipe("loop", 1, lambda devices, microbatches, stages: make(devices, microbatches))


def _v(make: Callable[[int, int], Schedule]) -> Recipe:
    return Recipe("v", 2, lambda devices, microbatches, stages: make(devices, microbatches))


RECIPES: Mapping[str, Recipe] = {
    "gpipe": _single(gpipe),
    "1f1b": _single(one_f_one_b),
    "interleaved-1f1b": Recipe("loop", None, interleaved_one_f_one_b),
    "breadth-first": Recipe("loop", None, breadth_first),
    "zb-h1": _single(zb_h1),
    "zb-h2": _single(zb_h2),
    "zb-v": _v(zb_v),
    "v-half": _v(v_half),
    "v-min": _v(v_min),
    "dualpipe-v": _v(dualpipe_v),
}


def known_schedule(name: str, stages: int, microbatches: int, devices: int | None = None) -> Schedule:
    """A known schedule for ``stages`` stages.

    Without ``devices``: one stage per device, or two where the schedule is made of several (interleaving, V-shapes).

    >>> known_schedule("zb-v", 4, 2).device_of
    (0, 1, 1, 0)
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ProblemError(f"there is no schedule {name!r}.", f"There are {', '.join(RECIPES)}.")
    check_size(stages, microbatches)
    usual = recipe.stages_per_device or 2
    if devices is None:
        devices = max(stages // usual, 1)
    if not 1 <= devices <= stages or (recipe.stages_per_device and devices * usual != stages):
        raise ProblemError(
            f"{name} does not fit {stages} stages on {devices} devices.",
            f"It has {recipe.stages_per_device or 'one or more'} stages per device: ask for {usual * devices} stages.",
        )
    return recipe.make(devices, microbatches, stages)
