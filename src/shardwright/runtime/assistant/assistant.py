"""The assistant of one module: before every step it looks at the clocks, every few steps the ranks tell each other what
they saw, and all of them come to the same decision by the same arithmetic on the same numbers.

The paper whose assistants this is named after (2019) is known to us by its abstract alone; the design is ours.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import start_gathering
from shardwright.errors import RunError, ShardwrightError
from shardwright.runtime.assistant.blocks import BlockMover
from shardwright.runtime.assistant.clocks import clock_on
from shardwright.runtime.assistant.events import Diary, Event, log
from shardwright.runtime.assistant.links import WINDOW, LinkWatch, answer_for
from shardwright.runtime.assistant.moving import Mover
from shardwright.runtime.assistant.watching import Rule, Verdict, Watch
from shardwright.runtime.executor import TRACED_AFTER
from shardwright.runtime.module import ParallelModule
from shardwright.runtime.moving import move
from shardwright.runtime.pipeline import PipelineModule
from shardwright.waiting import stop_clock

EVENTS_VARIABLE = "SHARDWRIGHT_ASSIST_EVENTS"
EVERY = 2
"""Steps between two exchanges of what was seen."""
WARM_STEPS = TRACED_AFTER + 3
"""Steps that are not typical at first: operators are traced, memory is allocated."""
SECONDS_PER_INSTRUCTION = 0.002
"""What a move is taken to cost before one has been made: a program is built and traced."""

Mode = Literal["act", "watch"]


class Assistant:
    """Watches the steps of a module and moves shares of its work. Made by :func:`assist`, ended by :meth:`leave`."""

    def __init__(
        self,
        module: ParallelModule | PipelineModule,
        optimizer: torch.optim.Optimizer | None,
        mode: Mode,
        rule: Rule,
        path: Path | None,
    ) -> None:
        self._mode, self._module, self._optimizer, self._rule = mode, module, optimizer, rule
        self._mover, instructions = _mover(module, optimizer)
        self.links, self._slower = LinkWatch(), 1.0
        self.watch = Watch(self._units(self._mover.shares.rows), rule)
        self.diary = Diary(path) if dist.get_rank() == 0 else None
        self.step = 0
        self._clock = clock_on(self._mover.device)
        self._cost = SECONDS_PER_INSTRUCTION * instructions
        self._warm, self._typical, self._stepped = WARM_STEPS, True, True
        self._waiting: tuple[Tensor, int] | None = None
        self._told: Verdict | None = None
        self._hooks: list[Any] = [module.register_forward_pre_hook(self._before)]
        self._accumulates = optimizer is not None
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_update))
            self._hooks.append(optimizer.register_step_post_hook(self._after_update))

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the batch or parts of cut loops that each rank of the axis has, or blocks of each stage."""
        return self._mover.shares.rows

    @property
    def _what(self) -> str:
        return self._mover.shares.what

    @property
    def events(self) -> Sequence[Event]:
        """What was decided so far (on rank 0)."""
        return () if self.diary is None else self.diary.events

    def leave(self) -> None:
        """Stop watching; the shares stay as they are."""
        stop_clock(self._clock)
        for hook in self._hooks:
            hook.remove()

    def move(self, rows: Sequence[int]) -> bool:
        """Deal the work out like this from the next step on; to be called alike on every rank.

        False where some rank has no program for it; then nothing has changed.
        """
        if len(rows) != len(self.rows) or sum(rows) != sum(self.rows) or min(rows) < 1:
            raise RunError(
                f"{list(rows)} do not share out {sum(self.rows)} {self._what} between {len(self.rows)}.",
                f"Give each at least one, and all {self._what} to somebody.",
            )
        began = perf_counter()
        done = tuple(rows) == self.rows or self._mover.move(tuple(rows))
        self._spent = perf_counter() - began
        self.watch.moved(self._units(self.rows))
        self.links.restart()
        self._warm = 2
        return done

    def _units(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(count // self._mover.shares.unit for count in rows)

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

    def _exchange(self) -> None:
        """Tell the other ranks what this one saw; on accelerators the answer is read at the next exchange."""
        last = self.step - self._clock.lag
        mine = torch.tensor([*self._clock.take(EVERY)], dtype=torch.float64).view(1, EVERY, 3)
        if self._mover.device.type != "cpu":
            self._read()
            mine = mine.to(self._mover.device, non_blocking=True)
        for line in self._mover.lines:
            mine = start_gathering(mine, line.size, line.group).wait()
        self._waiting = (mine, last)
        if self._mover.device.type == "cpu":
            self._read()

    def _read(self) -> None:
        if self._waiting is None:
            return
        (gathered, last), self._waiting = self._waiting, None
        table = gathered.cpu().numpy()
        # Ranks that share one part of the work wait for each other: the part is as slow as the slowest of them.
        parts = [table[place] for place in self._mover.places]
        work, update = (np.stack([part[..., column].max(0) for part in parts]) for column in (0, 2))
        waited = np.stack([part[..., 1].min(0) for part in parts])
        moves_too = self._mover.shares.weights  # the update of a parameter goes with it
        for place in range(EVERY):
            apart = () if moves_too else update[:, place]
            if np.isfinite(waited[:, place]).all():
                self.links.add(float(waited[:, place].min()))
            self.watch.add(last - EVERY + place, work[:, place], waited[:, place], apart)
        self.watch.learn()
        self._reached()
        self._observed()
        if self._mover.held_back:
            return
        found = self.watch.verdict(self._cost)
        if found is None:
            self._look_at_links()
        if found is not None and (self._mode == "act" or self._told is None or found.rows != self._told.rows):
            self._decide(found)

    def _decide(self, found: Verdict) -> None:
        before, unit = self.rows, self._mover.shares.unit
        rows = tuple(count * unit for count in found.rows)
        what, self._told = "could move", found
        seconds = 0.0
        if self._mode == "act":
            what = "moved" if self.move(rows) else "refused"
            seconds = self._slowest(self._spent)
            self._cost = seconds if what == "moved" else float("inf")
            self.watch.slowness = found.slowness
        self._tell(what, before, rows, found, seconds)

    def _look_at_links(self) -> None:
        """Where a link has changed: go over to a plan for it that is enough faster, and watch that."""
        seconds, plan = self.watch.step_seconds, getattr(self._module, "_plan", None)
        ratio = None if seconds is None or plan is None or self._optimizer is None else self.links.changed(seconds)
        if ratio is None or isinstance(self._module, PipelineModule):
            return
        assert seconds is not None and plan is not None
        self.links.restart()
        factor = max(self._slower * ratio, 1.0)
        answer = answer_for(plan, self._module.graph, factor)
        if answer is None or 1 - answer.expected / answer.staying < self._rule.gain:
            return
        saved = seconds * (1 - answer.expected / answer.staying)
        what, rows = "could change", self.rows
        if saved * self._rule.steps < answer.spent + self._cost:
            return
        began = perf_counter()
        if self._mode == "act":
            try:
                move(self._module, self._optimizer, answer.plan)
                what = "changed"
            except ShardwrightError:
                what = "refused"
        self._slower = factor
        spent = answer.spent + self._slowest(perf_counter() - began)
        if self.diary is not None:
            slowness = (factor,) * len(rows)
            times = (seconds, seconds - saved, seconds - saved, spent)
            self.diary.tell(Event(what, self.step, rows, rows, slowness, 0, self.step - WINDOW, *times, "plan"))
        if what == "changed":
            self._watch_anew()

    def _watch_anew(self) -> None:
        """Under another plan other shares can move, or none."""
        try:
            self._mover, _ = _mover(self._module, self._optimizer)
        except RunError as error:
            log.warning("shardwright: no further assistance: %s", error.message)
            self.leave()
            return
        self.watch = Watch(self._units(self._mover.shares.rows), self._rule)
        self._warm = WARM_STEPS

    def _slowest(self, seconds: float) -> float:
        """All ranks reckon with the same cost of a move."""
        mine = torch.tensor([seconds], dtype=torch.float64, device=self._mover.device)
        for line in self._mover.lines:
            mine = start_gathering(mine, line.size, line.group).wait()
        return float(mine.max())

    def _reached(self) -> None:
        """Some steps after a move: was it as good as expected?"""
        if self._mode != "act" or self._told is None:
            return
        seconds = self.watch.step_seconds
        if seconds is not None:
            found, self._told = self._told, None
            self._tell("reached", self.rows, self.rows, found, 0.0, seconds)

    def _observed(self) -> None:
        if self.diary is None or not self.diary.due:
            return
        seconds = self.watch.step_seconds
        if seconds is not None:
            slowness = self.watch.seen_slowness
            self.diary.observe(
                Event("observed", self.step, self.rows, self.rows, slowness, step_seconds=seconds, what=self._what)
            )

    def _tell(
        self,
        what: str,
        before: tuple[int, ...],
        rows: tuple[int, ...],
        found: Verdict,
        spent: float,
        seconds: float | None = None,
    ) -> None:
        if self.diary is not None:
            own = found.seconds if seconds is None else seconds
            times = (own, found.expected, found.possible, spent)
            self.diary.tell(
                Event(what, self.step, before, rows, found.slowness, found.rank, found.since, *times, self._what)
            )


def assist(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    mode: Mode = "act",
    rule: Rule | None = None,
    events: str | Path | None = None,
) -> Assistant:
    """Watch the steps of a parallelized model and move work away from ranks that have become slower, and back.

    Called alike on every rank, after ``parallelize``. Losses, gradients and parameters stay those of one process: only
    who computes what of the next batch changes, between two steps. Rows of the batch move where a plan cuts it and uses
    parameters whole; parts of cut loops, with their parameters and optimizer state, where it cuts those (tensor
    parallelism); blocks between stages in a pipeline.

    Parameters
    ----------
    model
        What :func:`shardwright.parallelize` gave.
    optimizer
        Its state moves with parameters. A step is over when it has been called; without one, every forward pass in
        training begins a step, and only rows of the batch can move.
    mode
        ``"act"``, or ``"watch"``, which only tells what could be moved.
    rule
        When a move is worth making (:class:`~shardwright.runtime.assistant.watching.Rule`).
    events
        A file for one JSON object per decision (and one observation a second), written by rank 0.

    Examples
    --------
    >>> model = shardwright.parallelize(model, plan)                      # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(model.parameters())                 # doctest: +SKIP
    >>> assistant = shardwright.assist(model, optimizer)                  # doctest: +SKIP
    """
    if not isinstance(model, ParallelModule | PipelineModule):
        raise RunError(
            f"A {type(model).__name__} is not a parallelized module.",
            "Call assist() with what shardwright.parallelize() gave.",
        )
    check_mode(mode)
    path = events if events is not None else os.environ.get(EVENTS_VARIABLE)
    return Assistant(model, optimizer, mode, rule or Rule(), None if path is None else Path(path))


def _mover(
    module: ParallelModule | PipelineModule, optimizer: torch.optim.Optimizer | None
) -> tuple[Mover | BlockMover, int]:
    """What moves the work of a module, and how many instructions a move has to build anew."""
    if isinstance(module, PipelineModule):
        stages = [len(part.executor.program.instructions) for part in module._parts.values()]
        return BlockMover(module, optimizer), max(stages)
    return Mover(module, optimizer), len(module.program.instructions)


def check_mode(mode: str) -> None:
    if mode not in ("act", "watch"):
        raise RunError(f"The assistant cannot {mode!r}.", "Its mode is 'act' or 'watch'.")
