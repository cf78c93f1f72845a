"""Which device holds which stage: once around the devices, or down and up again.

A loop gives stage ``s`` to device ``s mod d`` (interleaving, Narayanan et al. 2021); a V gives device ``d`` a stage
on the way down and one on the way back, so that the last stage of the way down hands over to itself (Qi et al. 2024).
The two words are those of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from shardwright.errors import ProblemError
from shardwright.schedules.schedule import check_size

SHAPES = ("loop", "v")


def stage_devices(devices: int, stages: int, shape: str = "loop") -> tuple[int, ...]:
    """The device of every stage.

    >>> stage_devices(3, 6), stage_devices(3, 6, "v")
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    check_size(stages, 1)
    if devices < 1 or stages < devices:
        raise ProblemError(
            f"{stages} stages cannot occupy {devices} devices.", "Ask for at least one stage for every device."
        )
    if shape == "loop":
        return tuple(stage % devices for stage in range(stages))
    if shape != "v":
        raise ProblemError(f"there is no shape {shape!r}.", f"Shapes are {', '.join(SHAPES)}.")
    if stages % devices:
        raise ProblemError(
            f"a V over {devices} devices has a multiple of {devices} stages, not {stages}.",
            f"Ask for {stages // devices * devices or devices} stages.",
        )
    legs = (divmod(stage, devices) for stage in range(stages))
    return tuple(place if leg % 2 == 0 else devices - 1 - place for leg, place in legs)
