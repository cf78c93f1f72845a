"""How many blocks of a stage recompute, and how: as few and as cheaply as its memory asks for.

A block may keep everything, recompute what is cheap of it, or recompute all of it (:mod:`shardwright.program.blocks`). What
is cheap usually frees a byte for the least time, so blocks recompute lightly first, and wholly only where all of them doing
that would not be enough; or one more wholly and fewer lightly, or wholly alone, where that happens to take less. While a
block is computed again, what it recomputes is there in full. Stages of a general graph have unlike blocks: all of them
recompute, lightly or wholly, or none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.search.joint.blocks import BlockPrice
from shardwright.search.joint.pieces import PiecePrice
from shardwright.search.joint.problem import Floats


class Recomputing(NamedTuple):
    """Per stage: seconds more (infinite where it does not fit), blocks that recompute wholly, and lightly."""

    seconds: Floats
    wholly: Floats
    lightly: Floats


Price = BlockPrice | PiecePrice


def recomputed(price: Price, over: Floats, kinds: np.ndarray, held: Floats) -> Recomputing:
    """What stages of these kinds recompute that are ``over`` their memory by so many bytes."""
    if price.always:
        return everything(price, over, kinds, held)
    if isinstance(price, BlockPrice):
        return recomputing(price, over, kinds[0][:, None], held)
    return all_or_nothing(price, over, kinds, held)


def freed_by(price: Price, kind: np.ndarray, wholly: float, lightly: float, held: float) -> tuple[float, float]:
    """Bytes that the recomputing blocks of a stage free, and what is there in full while one is computed again."""
    if isinstance(price, BlockPrice):
        return freed(price, wholly, lightly, held)
    again = price.wholly if wholly else price.lightly
    if not wholly + lightly:
        return 0.0, 0.0
    return float(again.saved(kind, np.array([wholly + lightly]))[0]) * held, again.meanwhile


def everything(price: Price, over: Floats, kinds: np.ndarray, held: Floats) -> Recomputing:
    """The same where every block recomputes wholly."""
    if isinstance(price, BlockPrice):
        blocks, seconds, saves = kinds[0], kinds[0] * price.wholly.seconds, kinds[0] * price.wholly.saves
        meanwhile = price.held.block
    else:
        blocks, seconds = price.blocks[kinds[0], kinds[1]], price.wholly.seconds.of(*kinds)
        saves, meanwhile = price.wholly.saved(kinds, blocks), price.wholly.meanwhile
    some = (blocks > 0)[:, None]
    fits = over + meanwhile * some <= np.where(some, saves[:, None] * held, 0.0)
    none = np.zeros_like(over)
    return Recomputing(np.where(fits, np.where(some, seconds[:, None], 0.0), np.inf), none + blocks[:, None], none)


def all_or_nothing(price: PiecePrice, over: Floats, kinds: np.ndarray, held: Floats) -> Recomputing:
    """The same where all blocks of a stage recompute alike."""
    none, blocks = np.zeros_like(over), price.blocks[kinds[0], kinds[1]]
    best = Recomputing(np.where(over <= 0, 0.0, np.inf), none, none)
    for again, wholly in ((price.lightly, 0), (price.wholly, 1)):
        fits = (blocks > 0)[:, None] & (over + again.meanwhile <= again.saved(kinds, blocks)[:, None] * held)
        seconds = np.where(fits, again.seconds.of(*kinds)[:, None], np.inf)
        better, all_of_them = seconds < best.seconds, np.broadcast_to(blocks[:, None], over.shape)
        found = (seconds, wholly * all_of_them, (1 - wholly) * all_of_them)
        best = Recomputing(*(np.where(better, new, old) for new, old in zip(found, best, strict=True)))
    return best


def recomputing(price: BlockPrice, over: Floats, blocks: Floats, held: Floats) -> Recomputing:
    """What stages recompute that are ``over`` their memory by so many bytes, by blocks and by micro-batches held."""
    wholly, lightly = price.wholly.saves * held, price.lightly.saves * held
    none, few = np.zeros_like(over), 1e-9
    if over.max() <= 0.0:
        return Recomputing(none, none, none)
    if (over > (1 + few) * blocks * np.maximum(wholly, lightly)).all():  # not even all blocks free as much
        return Recomputing(none + np.inf, none, none)
    enough = over + price.lightly.saves <= blocks * lightly
    left = np.where(enough, 0.0, over + price.held.block - blocks * lightly)
    least, alone = left / np.maximum(wholly - lightly, few), (over + price.held.block) / np.maximum(wholly, few)
    best = Recomputing(np.where(over <= 0, 0.0, np.inf), none, none)
    for number in (np.maximum(np.ceil(number), 0.0) for number in (alone, least, least + 1)):
        more = over + np.where(number > 0, price.held.block, price.lightly.saves) - number * wholly
        beside = np.ceil(np.maximum(more, 0.0) / np.maximum(lightly, few))
        fits = (number + beside <= blocks) & ((number == 0) | (price.wholly.saves > 0))
        fits &= (beside == 0) | (price.lightly.saves > 0)
        seconds = np.where(fits, number * price.wholly.seconds + beside * price.lightly.seconds, np.inf)
        better = seconds < best.seconds
        best = Recomputing(
            *(np.where(better, new, old) for new, old in zip((seconds, number, beside), best, strict=True))
        )
    return best


def freed(price: BlockPrice, wholly: float, lightly: float, held: float) -> tuple[float, float]:
    """Bytes that so many recomputing blocks free, and what is there in full while one is computed again."""
    bytes_freed = (wholly * price.wholly.saves + lightly * price.lightly.saves) * held
    return bytes_freed, price.held.block if wholly else price.lightly.saves if lightly else 0.0
