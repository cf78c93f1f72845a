"""How many blocks recompute, and how, against every other number of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest

from shardwright.search.joint.blocks import NEVER, Again
from shardwright.search.joint.parts import Parts
from shardwright.search.joint.recomputing import freed, recomputing


@dataclass(frozen=True)
class Price:
    """As much of a block's price as recomputing looks at."""

    wholly: Again
    lightly: Again
    held: Parts


def _found(price: Price, over: float, blocks: int, held: int) -> tuple[float, int, int]:
    given = (np.array([[over]]), np.array([[blocks]]), np.array([held]))
    seconds, wholly, lightly = (x[0, 0] for x in recomputing(price, *given))  # type: ignore[arg-type]
    return float(seconds), int(wholly), int(lightly)


def _fits(price: Price, over: float, held: int, wholly: int, lightly: int) -> bool:
    less, meanwhile = freed(price, wholly, lightly, held)  # type: ignore[arg-type]
    return over - less + meanwhile <= 1e-6 or over <= 0


@pytest.mark.parametrize("seed", range(200))
def test_as_few_and_as_cheaply_as_memory_asks_for(seed: int) -> None:
    """Where light blocks free a byte for less, no other numbers are faster by more than one light block takes."""
    rng = random.Random(seed)
    block = rng.uniform(1.0, 10.0)
    wholly = Again(rng.uniform(1.0, 4.0), rng.uniform(0.5, 1.0) * block)
    lightly = Again(rng.uniform(0.05, 1.0) * wholly.seconds * 0.4, 0.4 * wholly.saves)
    price, blocks, held = Price(wholly, lightly, Parts(0.0, block, 0.0)), rng.randint(1, 12), rng.randint(1, 6)
    over = rng.uniform(-0.2, 1.0) * blocks * held * wholly.saves
    seconds, *numbers = _found(price, over, blocks, held)
    every = [
        (w * wholly.seconds + n * lightly.seconds, w, n)
        for w, n in itertools.product(range(blocks + 1), repeat=2)
        if w + n <= blocks and _fits(price, over, held, w, n)
    ]
    if not every:
        assert seconds == np.inf
        return
    assert _fits(price, over, held, *numbers) and sum(numbers) <= blocks
    assert seconds == pytest.approx(numbers[0] * wholly.seconds + numbers[1] * lightly.seconds)
    assert min(every)[0] <= seconds + 1e-9 <= min(every)[0] + lightly.seconds + 2e-9


def test_what_fits_recomputes_nothing_and_what_may_not_recompute_does_not() -> None:
    price = Price(Again(1.0, 4.0), Again(0.1, 1.0), Parts(0.0, 5.0, 0.0))
    assert _found(price, -1.0, 4, 2) == (0.0, 0, 0)
    assert _found(price, 1.0, 4, 2) == (0.1, 0, 1)
    assert _found(Price(NEVER, NEVER, price.held), 1.0, 4, 2)[0] == np.inf
    assert _found(Price(price.wholly, NEVER, price.held), 1.0, 4, 2) == (1.0, 1, 0)
