"""What if devices had work queues that hand pieces over by themselves? A step of equal pieces, simulated.

A step is a number of equal pieces and a barrier. Every device begins with a share in its queue and works through it
at a speed that changes over time. With queues that steal (Blumofe and Leiserson 1999), a device that runs dry takes
waiting pieces of another: it waits for the latency of asking and until the pieces, which arrive together, are
there. Without, shares are what software decided before the step: equal, or in proportion to the speeds
seen in the steps before. All runs of a comparison see the same speeds at the same times, so that only the
distribution differs. With neither latency nor travel, stealing one piece at a time is list scheduling, and Graham's
bound (1966) holds: no device idles before the last piece has begun.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from random import Random

from shardwright.errors import ProblemError
from shardwright.search.dealing import deal

VICTIMS = ("fullest", "random", "neighbour")
AMOUNTS = ("one", "half")


@dataclass(frozen=True)
class Queues:
    """How pieces change hands: seconds to ask, seconds per piece on the way, whom to ask, how many to take.

    ``fullest`` knows all queues, ``random`` draws among those with waiting pieces, ``neighbour`` asks the devices in
    a ring, the next first.
    """

    latency: float = 0.0
    travel: float = 0.0
    victim: str = "fullest"
    amount: str = "one"

    def __post_init__(self) -> None:
        if self.latency < 0 or self.travel < 0:
            raise ProblemError(f"{self} has negative seconds.", "Latency and travel are at least 0.")
        if self.victim not in VICTIMS or self.amount not in AMOUNTS:
            raise ProblemError(
                f"there is no rule {self.victim!r} with amount {self.amount!r}.",
                f"Victims are {', '.join(VICTIMS)}; amounts are {', '.join(AMOUNTS)}.",
            )


@dataclass(frozen=True)
class Speeds:
    """Pieces per second of every device, constant within intervals of ``interval`` seconds; the last one lasts for
    ever.
    """

    interval: float
    values: tuple[tuple[float, ...], ...]

    @property
    def devices(self) -> int:
        return len(self.values)

    def finish(self, device: int, start: float, pieces: float) -> float:
        """When ``pieces`` begun at ``start`` are done.

        >>> Speeds(1.0, ((1.0, 0.5),)).finish(0, 0.5, 1.0)
        2.0
        """
        values = self.values[device]
        place = min(int(start / self.interval), len(values) - 1)
        now = start
        while place < len(values) - 1:
            border = (place + 1) * self.interval
            done = (border - now) * values[place]
            if done >= pieces:
                return now + pieces / values[place]
            pieces -= done
            now = border
            place += 1
        return now + pieces / values[place]

    def possible(self, start: float, pieces: float) -> float:
        """When all devices together could have done ``pieces`` at the earliest, were work divisible: no run ends
        earlier.
        """
        together = tuple(sum(values) for values in zip(*self.values, strict=True))
        return Speeds(self.interval, (together,)).finish(0, start, pieces)


def noisy_speeds(base: Sequence[float], noise: float, interval: float, seconds: float, seed: int) -> Speeds:
    """Speeds that vary around ``base``: in every interval each is divided by a log-normal factor with spread
    ``noise``.
    """
    random = Random(seed)
    count = max(int(seconds / interval) + 1, 1)
    return Speeds(interval, tuple(tuple(v * exp(-noise * random.gauss(0, 1)) for _ in range(count)) for v in base))


@dataclass(frozen=True)
class Step:
    """A simulated step: when the last piece was done, how many pieces each device did and its busy seconds, pieces
    stolen.
    """

    start: float
    end: float
    done: tuple[int, ...]
    busy: tuple[float, ...]
    stolen: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


def run_step(
    speeds: Speeds, shares: Sequence[int], queues: Queues | None = None, start: float = 0.0, seed: int = 0
) -> Step:
    """One step from ``start``: every device with its share of the pieces, with stealing if there are ``queues``.

    >>> even = Speeds(1.0, ((1.0,), (0.5,)))
    >>> run_step(even, (3, 3)).seconds, run_step(even, (3, 3), Queues()).seconds
    (6.0, 4.0)
    """
    if len(shares) != speeds.devices or min(shares) < 0:
        raise ProblemError(
            f"shares {tuple(shares)} for {speeds.devices} devices.", "Give one share per device, none negative."
        )
    random = Random(seed)
    waiting, done = list(shares), [0] * speeds.devices
    busy = [0.0] * speeds.devices
    end, stolen = start, 0
    # (time, device, pieces that arrive then): a device that is free, having waited for what it asked for
    free = [(start, device, 0) for device in range(speeds.devices)]
    heapq.heapify(free)
    while free:
        now, device, arrived = heapq.heappop(free)
        if not arrived and waiting[device] == 0 and queues is not None:
            victim = _victim(waiting, device, queues, random)
            if victim is not None:
                taken = 1 if queues.amount == "one" else (waiting[victim] + 1) // 2
                waiting[victim] -= taken
                stolen += taken
                ready = now + queues.latency + queues.travel * taken
                heapq.heappush(free, (ready, device, taken))
            continue
        if arrived:
            waiting[device] += arrived - 1
        elif waiting[device]:
            waiting[device] -= 1
        else:
            continue
        finished = speeds.finish(device, now, 1.0)
        busy[device] += finished - now
        done[device] += 1
        end = max(end, finished)
        heapq.heappush(free, (finished, device, 0))
    return Step(start, end, tuple(done), tuple(busy), stolen)


def _victim(waiting: list[int], thief: int, queues: Queues, random: Random) -> int | None:
    """Whom to take from: somebody with waiting pieces, or nobody."""
    others = [device for device, count in enumerate(waiting) if count and device != thief]
    if not others:
        return None
    if queues.victim == "fullest":
        return max(others, key=lambda device: (waiting[device], -device))
    if queues.victim == "random":
        return random.choice(others)
    return min(others, key=lambda device: (device - thief) % len(waiting))


@dataclass(frozen=True)
class Software:
    """The software assistant: shares in proportion to the speeds seen so far, a step seen counting ``weight`` of the
    estimate.
    """

    weight: float = 0.5


def run_job(
    speeds: Speeds,
    pieces: int,
    steps: int,
    software: Software | None = None,
    queues: Queues | None = None,
    seed: int = 0,
) -> list[Step]:
    """Steps one after the other; shares stay equal or follow the software assistant's estimates."""
    estimates = [1.0] * speeds.devices
    now, found = 0.0, []
    for number in range(steps):
        shares = proportional(estimates, pieces)
        step = run_step(speeds, shares, queues, now, seed + number)
        if software is not None:
            for device, (count, seconds) in enumerate(zip(step.done, step.busy, strict=True)):
                if count:
                    weight = software.weight if number else 1.0
                    estimates[device] += weight * (count / seconds - estimates[device])
        found.append(step)
        now = step.end
    return found


def proportional(speeds: Sequence[float], pieces: int) -> tuple[int, ...]:
    """Whole shares with the shortest step at these speeds: each piece to the device that would be done with it first.

    >>> proportional([1.0, 0.5], 6)
    (4, 2)
    """
    return deal(pieces, len(speeds), lambda device, count: count / speeds[device])


def break_even(latencies: Sequence[float], seconds: Sequence[float], rival: float) -> float:
    """The latency at which rising ``seconds`` meet ``rival`` (interpolated): infinite where they never do, 0 where
    they always lie above.

    >>> break_even([0.0, 1.0, 2.0], [1.0, 2.0, 4.0], 3.0)
    1.5
    """
    if seconds[0] > rival:
        return 0.0
    place = bisect_right(list(seconds), rival)
    if place == len(seconds):
        return float("inf")
    below, above = seconds[place - 1], seconds[place]
    share = (rival - below) / (above - below) if above > below else 0.0
    return latencies[place - 1] + share * (latencies[place] - latencies[place - 1])
