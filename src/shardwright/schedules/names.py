"""The known schedules by name, each for any number of stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.errors import ProblemError
from shardwright.schedules.schedule import Schedule, check_size


@dataclass(frozen=True)
class Recipe:
    """How a known schedule is made: ``make(devices, microbatches, stages)`` on devices in a shape."""

    shape: str
    stages_per_device: int | None  # None: any number
    make: Callable[[int, int, int], Schedule]


RECIPES: dict[str, Recipe] = {}


def named(
    name: str, stages_per_device: int | None = 1, shape: str = "loop"
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """A function of devices and micro-batches, and of stages where a device may hold any number, under its known name."""

    def register(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        def make(devices: int, microbatches: int, stages: int) -> Schedule:
            sizes = (devices, microbatches) if stages_per_device else (devices, microbatches, stages)
            return function(*sizes)

        RECIPES[name] = Recipe(shape, stages_per_device, make)
        return function

    return register


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
