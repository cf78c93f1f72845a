"""Placements and layouts as text: ``R``, ``S0``, ``P(sum)``, and ``W0(1,-1,1)`` for a window."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import PlanError
from shardwright.operators.rules import Layout, Need, Placement, Window
from shardwright.records import shown

REDUCTIONS = ("sum", "avg", "product", "max", "min")


def placement_text(placement: Need) -> str:
    """``R``, ``S1``, ``P(sum)`` or ``W0(1,-1,1)``.

    >>> placement_text(Shard(1)), placement_text(Window(2, 1, -1, 1))
    ('S1', 'W2(1,-1,1)')
    """
    if isinstance(placement, Window):
        return f"W{placement.dim}({placement.scale},{placement.low},{placement.high})"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return f"P({placement.reduce_op})" if isinstance(placement, Partial) else "R"


def placement_from(text: str) -> Placement:
    """The inverse of :func:`placement_text`, windows apart."""
    if text == "R":
        return Replicate()
    if re.fullmatch(r"S\d{1,3}", text, re.ASCII):
        return Shard(int(text[1:]))
    if text.startswith("P(") and text.endswith(")") and text[2:-1] in REDUCTIONS:
        return Partial(text[2:-1])
    raise PlanError(f"{shown(text)} is not a placement.", "Placements are R, S0, S1, … and P(sum).")


def need_from(text: str) -> Need:
    """The inverse of :func:`placement_text`."""
    found = re.fullmatch(r"W(\d{1,3})\((\d{1,9}),(-?\d{1,9}),(-?\d{1,9})\)", text, re.ASCII)
    return Window(*map(int, found.groups())) if found else placement_from(text)


def layout_text(layout: Sequence[Need]) -> list[str]:
    return [placement_text(p) for p in layout]


def layout_from(texts: Sequence[str]) -> Layout:
    return tuple(placement_from(t) for t in texts)


def needs_from(texts: Sequence[str]) -> tuple[Need, ...]:
    return cast("tuple[Need, ...]", tuple(need_from(t) for t in texts))
