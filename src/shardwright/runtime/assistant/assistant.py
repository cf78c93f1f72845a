"""The assistant of one module: before every step it looks at the clocks, every few steps the ranks tell each other what
they saw, and all of them come to the same decision by the same arithmetic on the same numbers.

The paper whose assistants this is named after (2019) is known to us by its abstract alone; the design is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import start_gathering
from shardwright.errors import RunError
from shardwright.program.steps import Line
from shardwright.runtime.assistant.changing import Changes
from shardwright.runtime.assistant.clocks import clock_on
from shardwright.runtime.assistant.events import Diary, Event, log
from shardwright.runtime.assistant.links import WINDOW, LinkWatch, OtherPlan
from shardwright.runtime.assistant.watched_movers import FIXED, WAITED, WatchedMover, instructions_of, watched_movers
from shardwright.runtime.assistant.watching import Rule, SpeedWatch, Verdict
from shardwright.runtime.executor import TRACED_AFTER
from shardwright.runtime.module import ParallelModule
from shardwright.waiting import stop_clock

EVERY = 2
"""Steps between two exchanges of what was seen."""
WARM_STEPS = TRACED_AFTER + 3
"""Steps that are not typical at first: operators are traced, memory is allocated."""
SECONDS_PER_INSTRUCTION = 0.002
"""What a move is taken to cost before one has been made: a program is built and traced."""

Mode = Literal["act", "watch"]


class Assistant:
    """Watches the steps of a module and moves shares of its work. Made by :func:`~shardwright.assist`, ended by
    :meth:`leave`."""

    def __init__(
        self,
        module: ParallelModule,
        optimizer: torch.optim.Optimizer | None,
        mode: Mode,
        rule: Rule,
        path: Path | None,
    ) -> None:
        self._mode, self._module, self._optimizer, self._rule = mode, module, optimizer, rule
        self._device: torch.device = module._device
        self._movers = watched_movers(module, optimizer, rule)
        self.links = LinkWatch()
        self.diary = Diary(path) if dist.get_rank() == 0 else None
        self.step = 0
        self._clock = clock_on(self._device)
        self._cost = SECONDS_PER_INSTRUCTION * instructions_of(module)
        self._warm, self._typical, self._stepped = WARM_STEPS, True, True
        self._waiting: tuple[Tensor, int] | None = None
        self._told: Verdict | None = None
        self._changes = Changes(module, optimizer, rule)
        self._hooks: list[Any] = [module.register_forward_pre_hook(self._before)]
        self._accumulates = optimizer is not None
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_update))
            self._hooks.append(optimizer.register_step_post_hook(self._after_update))

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the batch or parts of cut loops that each rank of the axis has, or blocks of each stage: of the cheapest
        thing that can be moved."""
        return self._movers[0].rows if self._movers else ()

    @property
    def watch(self) -> SpeedWatch:
        """What is known of those who share them."""
        return self._movers[0].watch

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks that are so slow that the others go on without them."""
        absence = self._changes.absence
        return () if absence is None else tuple(sorted(absence.left_out))

    @property
    def events(self) -> Sequence[Event]:
        """What was decided so far (on rank 0)."""
        return () if self.diary is None else self.diary.events

    def leave(self) -> None:
        """Stop watching; the shares stay as they are."""
        with suppress(ValueError):  # gone already
            stop_clock(self._clock)
        for hook in self._hooks:
            hook.remove()

    def move(self, rows: Sequence[int], watched: WatchedMover | None = None) -> bool:
        """Deal the work out like this from the next step on; to be called alike on every rank.

        False where some rank has no program for it; then nothing has changed.
        """
        watched = watched or self._movers[0]
        what = watched.mover.shares.what
        if len(rows) != len(watched.rows) or sum(rows) != sum(watched.rows) or min(rows) < 1:
            raise RunError(
                f"{list(rows)} do not share out {sum(watched.rows)} {what} between {len(watched.rows)}.",
                f"Give each at least one, and all {what} to somebody.",
            )
        done = tuple(rows) == watched.rows or watched.mover.move(tuple(rows))
        for other in self._movers:
            other.watch.moved(other.units(other.rows))
        self.links.restart()
        self._warm = 2
        return done

    def _before_update(self, *_: Any) -> None:
        self._clock.update_begins()

    def _after_update(self, *_: Any) -> None:
        self._stepped = True

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        """Before every forward pass: where a step begins, the one before has ended."""
        if torch.compiler.is_compiling():
            return
        if not (torch.is_grad_enabled() and module.training):
            self._typical = False  # an evaluation between two steps is part of neither
            return
        if not self._stepped:
            return
        self._stepped = not self._accumulates
        self._warm -= self._warm > 0
        self._clock.turn(self._typical and not self._warm)
        self._typical, self.step = True, self.step + 1
        if len(self._clock) >= EVERY + self._clock.lag:
            self._exchange()
        self._look_for_return()

    @property
    def _lines(self) -> list[Line]:
        """Along which those that work tell each other; none for a rank that only looks on, or works alone."""
        if self._movers:
            return self._movers[0].mover.lines
        return []

    def _exchange(self) -> None:
        """Tell the other ranks what this one saw; on accelerators the answer is read at the next exchange."""
        last = self.step - self._clock.lag
        fixed = [watched.fixed for watched in self._movers]
        seen = [[*seconds, *fixed] for seconds in self._clock.take(EVERY)]
        if not self._movers:
            return
        mine = torch.tensor(seen, dtype=torch.float64).view(1, EVERY, FIXED + len(fixed))
        if self._device.type != "cpu":
            self._read()
            mine = mine.to(self._device, non_blocking=True)
        self._waiting = (self._gathered(mine), last)
        if self._device.type == "cpu":
            self._read()

    def _gathered(self, mine: Tensor) -> Tensor:
        for line in self._lines:
            mine = start_gathering(mine, line.size, line.group).wait()
        return mine

    def _read(self) -> None:
        if self._waiting is None:
            return
        (gathered, last), self._waiting = self._waiting, None
        table = gathered.cpu().numpy()
        waited = table[..., WAITED].min(0)
        for place in range(EVERY):
            if np.isfinite(waited[place]):
                self.links.add(float(waited[place]))
        for number, watched in enumerate(self._movers):
            watched.see(last - EVERY, table, number)
        self._reached()
        self._observed()
        if self._movers[0].mover.held_back:
            return
        for watched in self._movers:
            found = watched.watch.verdict(self._cost)
            if found is not None:
                if self._mode == "act" or self._told is None or found.rows != self._told.rows:
                    self._decide(watched, found)
                return
        if not self._look_at_ranks():
            self._look_at_links()

    def _decide(self, watched: WatchedMover, found: Verdict) -> None:
        before, unit = watched.rows, watched.mover.shares.unit
        rows = tuple(count * unit for count in found.rows)
        what, self._told, kind = "could move", found, watched.mover.shares.what
        seconds = 0.0
        if self._mode == "act":
            began = perf_counter()
            done = self._changes.leave_out(watched, found) if 0 in rows else self.move(rows, watched)
            what, seconds = "moved" if done else "refused", self._slowest(perf_counter() - began)
            watched.watch.slowness = found.slowness
            if 0 not in rows:
                self._cost = seconds if done else float("inf")
            elif done:
                self._watch_anew()
            else:
                watched.watch.droppable = False  # then with all of them
        self._tell(what, before, rows, found, seconds, kind=kind)

    def _look_for_return(self) -> None:
        """All ranks, those that look on too: are these fast enough again to be worth their share?"""
        absence, held = self._changes.absence, bool(self._movers) and self._movers[0].mover.held_back
        if absence is None or self.step % absence.every:
            return
        found = self._changes.worth_taking_back(self._cost)
        if found is None or held:
            return
        began = perf_counter()
        done = self._changes.take_back(found)
        self._told = found
        self._tell("moved" if done else "refused", absence.found.rows, found.rows, found, perf_counter() - began)
        if done:
            self._watch_anew()

    def _look_at_ranks(self) -> bool:
        """Where ranks have changed and shares cannot make up for it: go over to a plan that can, and watch that."""
        began = perf_counter()
        found = self._changes.for_ranks(self._movers[0], self._cost)
        if found is not None:
            answer, seen = found
            self._go_over(answer, seen.slowness, seen.rank, seen.since, seen.seconds, seen.ideal, began, "ranks")
        return found is not None

    def _look_at_links(self) -> None:
        """Where a link has changed: go over to a plan for it that is enough faster, and watch that."""
        seconds = self.watch.step_seconds
        began = perf_counter()
        answer = None if seconds is None else self._changes.for_links(self.links, seconds, self._cost)
        if answer is not None and seconds is not None:
            slowness = (self._changes.slower,) * len(self.rows)
            self._go_over(answer, slowness, 0, self.step - WINDOW, seconds, None, began, "links")

    def _go_over(
        self,
        answer: OtherPlan,
        slowness: tuple[float, ...],
        rank: int,
        since: int,
        seconds: float,
        possible: float | None,
        began: float,
        why: str,
    ) -> None:
        what, rows = "could change", self.rows
        if self._mode == "act":
            what = "changed" if self._changes.to(answer.plan) else "refused"
        spent = self._slowest(perf_counter() - began)
        if self.diary is not None:
            then = seconds * answer.expected / answer.staying
            times = (seconds, then, then if possible is None else min(possible, then), spent)
            self.diary.tell(Event(what, self.step, rows, rows, slowness, rank, since, *times, f"plan for {why}"))
        if what == "changed":
            self._watch_anew()

    def _watch_anew(self) -> None:
        """Under another plan other shares can move, or none."""
        self._warm, self._waiting, self._movers = WARM_STEPS, None, []
        self.links.restart()
        if not self._module._stages.own:
            return  # this rank only looks on
        try:
            self._movers = watched_movers(self._module, self._optimizer, self._rule)
        except RunError as error:
            if self._changes.absence is None:
                log.warning("shardwright: no further assistance: %s", error.message)
                self.leave()

    def _slowest(self, seconds: float) -> float:
        """All ranks reckon with the same cost of a move."""
        mine = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        return float(self._gathered(mine).max())

    def _reached(self) -> None:
        """Some steps after a move: was it as good as expected?"""
        if self._mode != "act" or self._told is None:
            return
        seconds = self.watch.step_seconds
        if seconds is not None:
            found, self._told = self._told, None
            if len(found.rows) == len(self.rows):
                self._tell("reached", self.rows, self.rows, found, 0.0, seconds, self._movers[0].mover.shares.what)

    def _observed(self) -> None:
        if self.diary is None or not self.diary.due:
            return
        seconds = self.watch.step_seconds
        if seconds is not None:
            slowness, what = self.watch.seen_slowness, self._movers[0].mover.shares.what
            self.diary.observe(
                Event("observed", self.step, self.rows, self.rows, slowness, step_seconds=seconds, what=what)
            )

    def _tell(
        self,
        what: str,
        before: tuple[int, ...],
        rows: tuple[int, ...],
        found: Verdict,
        spent: float,
        seconds: float | None = None,
        kind: str = "rows",
    ) -> None:
        if self.diary is not None:
            own = found.seconds if seconds is None else seconds
            times = (own, found.expected, found.possible, spent)
            self.diary.tell(Event(what, self.step, before, rows, found.slowness, found.rank, found.since, *times, kind))
