"""Whole pieces of work dealt out to workers of unlike speeds, so that the last to finish is done first.

Every worker's seconds only grow with its pieces. Giving each piece to the worker that is done first with it is then optimal
for whole pieces: wherever another dealing ends earlier, some worker has a piece less in it, and that piece went to somebody
who was done with it no later. The run-time assistant, the planner's shares, and among the benchmarks the replays of
production jobs and the simulated hardware deal by this one function.
"""

from __future__ import annotations

from collections.abc import Callable

UNASKED = 0.9
"""Of the pieces, given out by a first guess; the others one by one."""


def deal(pieces: int, workers: int, seconds: Callable[[int, int], float], least: int = 0) -> tuple[int, ...]:
    """Pieces of every worker, ``least`` each; ``seconds(worker, count)`` grows with ``count``.

    >>> deal(9, 2, lambda worker, count: count * (1.0, 2.0)[worker])
    (6, 3)
    """
    usual = max(pieces // workers, 1)
    rough = [1 / seconds(worker, usual) for worker in range(workers)]
    room = UNASKED * (pieces - least * workers)
    shares = [least + int(room * part / sum(rough)) for part in rough]
    while sum(shares) < pieces:
        worker = min(range(workers), key=lambda w: seconds(w, shares[w] + 1))
        shares[worker] += 1
    while True:  # what was given unasked may have been too much somewhere
        giving = [w for w in range(workers) if shares[w] > least]
        if not giving:
            return tuple(shares)
        worst = max(giving, key=lambda w: seconds(w, shares[w]))
        other = min((w for w in range(workers) if w != worst), key=lambda w: seconds(w, shares[w] + 1), default=worst)
        if other == worst or seconds(other, shares[other] + 1) >= seconds(worst, shares[worst]):
            return tuple(shares)
        shares[worst] -= 1
        shares[other] += 1
