"""Schedules with split backward passes on one stage per device: ZB-H1 and ZB-H2 (Qi et al., ICLR 2024).

Both are 1F1B whose weights' gradients wait: the further down a stage, the longer, so that all devices hold equally
much and the waiting work fills the end. ZB-H1 warms up as 1F1B does and holds no more than its first device; ZB-H2
warms up twice as deep, holds nearly twice as much, and with equal times of F, I and W leaves no bubble inside a
device's span.
"""

from __future__ import annotations

from shardwright.schedules.names import named
from shardwright.schedules.schedule import FORWARD, INPUT, WEIGHT, Action, Schedule


@named("zb-h1")
def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Warm up as 1F1B; stage s owes the weights of s micro-batches.

    >>> print(zb_h1(2, 3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2 | 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return Schedule(tuple(_order(stage, microbatches, stages - stage, stage) for stage in range(stages)))


@named("zb-h2")
def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Warm up twice as deep; stage s owes the weights of 2 s micro-batches."""
    return Schedule(tuple(_order(stage, microbatches, 2 * (stages - stage) - 1, 2 * stage) for stage in range(stages)))


def _order(stage: int, microbatches: int, warm: int, owed: int) -> tuple[Action, ...]:
    order = [Action(stage, FORWARD, i) for i in range(min(warm, microbatches))]
    for i in range(microbatches):
        order.append(Action(stage, INPUT, i))
        if i >= owed:
            order.append(Action(stage, WEIGHT, i - owed))
        if i + warm < microbatches:
            order.append(Action(stage, FORWARD, i + warm))
    order += [Action(stage, WEIGHT, i) for i in range(max(microbatches - owed, 0), microbatches)]
    return tuple(order)
