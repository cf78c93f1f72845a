"""Do the ranks drop what they should? One pattern where they hold the same activations, another one where they do not.

Numbers that are drawn cannot be compared with those of one process. But where two ranks are given the same
activations by the same dropout they are replicas and must drop the same; where they are given different ones (other
rows, other heads, other positions) and drop the same places, they share a seed that they must not share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from shardwright.verification.candidates.observing import Dropped, Seen
from shardwright.verification.compare import Comparison
from shardwright.verification.streams import CERTAIN

SAME = 1e-6


def judged_masks(seen: Sequence[Seen]) -> Iterator[tuple[Comparison, tuple[int, int], bool]]:
    """For every dropout and pair of ranks that have it: the comparison, the ranks, and whether they are replicas.

    What comes after a dropout that was wrong is not looked at: its activations differ because of that.
    """
    keys = list(dict.fromkeys(key for rank in seen for key in rank.dropped))
    for key in keys:
        holding = [rank for rank in seen if key in rank.dropped]
        first_wrong = False
        for n, one in enumerate(holding):
            for other in holding[n + 1 :]:
                mine, theirs = one.dropped[key], other.dropped[key]
                if mine.data.shape != theirs.data.shape or not _telling(mine):
                    continue
                replicas = _replicas(mine, theirs)
                kept = (mine.kept == theirs.kept)[(mine.data != 0) & (theirs.data != 0)]
                alike = bool(kept.all())
                wrong = float(replicas != alike)
                first_wrong |= bool(wrong)
                what = "replicas that drop otherwise" if replicas else "parts that drop the same"
                where = f"{key}: {what}, ranks {one.rank} and {other.rank}"
                yield Comparison("stream", where, wrong, 1.0, 0.0), (one.rank, other.rank), replicas
        if first_wrong:
            return


def _replicas(one: Dropped, other: Dropped) -> bool:
    size = float(np.abs(one.data).max(initial=0.0))
    return bool((np.abs(one.data - other.data) <= SAME * size).all())


def _telling(dropped: Dropped) -> bool:
    """Whether two masks would hardly be equal by chance."""
    kept = float(dropped.kept.mean()) if len(dropped.kept) else 0.0
    agreeing = kept**2 + (1 - kept) ** 2
    return len(dropped.kept) * -math.log(max(agreeing, 1e-300)) >= CERTAIN
