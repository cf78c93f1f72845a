"""Another plan altogether, while a job runs: for links or ranks that have changed, or without ranks that are too slow.

All ranks decide alike by the same numbers and go over together (:mod:`~shardwright.runtime.moving`), or none does.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import torch
import torch.distributed as dist

from shardwright.errors import ShardwrightError
from shardwright.plans import Plan
from shardwright.runtime.assistant import events
from shardwright.runtime.assistant.drop_ranks import Absence, look_every, reference_speed
from shardwright.runtime.assistant.links import PLANNING_SECONDS, LinkWatch, OtherPlan, answer_for
from shardwright.runtime.assistant.other_plans import ALIKE, answer_for_ranks
from shardwright.runtime.assistant.watched_movers import WatchedMover
from shardwright.runtime.assistant.watching import Rule, Speeds, Verdict
from shardwright.runtime.module import ParallelModule
from shardwright.runtime.moving import move

STEADY = 8
"""Steps in which shares were not worth moving and speeds did not change, before another plan is looked for."""
OTHER = 1.2
"""A rank whose slowness has changed by this factor is another one."""


class Changes:
    """What a module's plan was changed for, and what it would be changed back for."""

    def __init__(self, module: ParallelModule, optimizer: torch.optim.Optimizer | None, rule: Rule) -> None:
        self._module, self._optimizer, self._rule = module, optimizer, rule
        self._device: torch.device = module._device
        self.slower = 1.0
        """The factor by which links are slower than planned."""
        self.absence: Absence | None = None
        self._returned = 0
        self._chosen_for: tuple[float, ...] = ()
        """Slownesses of all ranks that a plan was last looked for."""
        self._home: Plan | None = None
        """The plan before one was gone over to for ranks that were slow."""

    def to(self, plan: Plan) -> bool:
        """Whether all ranks run this plan now; otherwise nothing has changed."""
        try:
            move(self._module, self._optimizer, plan)
        except ShardwrightError as error:
            events.log.info("shardwright: %s", error.message)
            return False
        return True

    def leave_out(self, watched: WatchedMover, found: Verdict) -> bool:
        """Go on without the ranks that are given nothing."""
        mover, unit = watched.mover, watched.mover.shares.unit
        ranks, plans = tuple(map(tuple, mover.ranks)), mover.plans()

        def plan_for(rows: tuple[int, ...]) -> Plan:
            return plans(tuple(count * unit for count in rows))

        try:
            plan = plan_for(found.rows)
        except ShardwrightError as error:  # the same on every rank
            events.log.info("shardwright: %s", error.message)
            return False
        if self.absence is not None or not self.to(plan):
            return False
        absence = Absence(found, ranks, plan_for, look_every(found.expected, self._returned), 0.0)
        here = dist.get_rank() in absence.left_out
        self.absence = replace(absence, speed=reference_speed(self._device)) if here else absence
        return True

    def worth_taking_back(self, move_seconds: float) -> Verdict | None:
        """The rows to deal out with those that were left out, where that gains enough; every rank of the job calls this."""
        absence, rank = self.absence, dist.get_rank()
        assert absence is not None
        own = absence.slowness(rank, self._device) if rank in absence.left_out else float("nan")
        mine = torch.tensor([own], dtype=torch.float64, device=self._device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        slowness = {other: float(every[other]) for other in absence.left_out}
        return absence.rows_with(slowness, self._rule, move_seconds)

    def take_back(self, found: Verdict) -> bool:
        """Deal the work out to all again."""
        absence = self.absence
        assert absence is not None
        if not self.to(absence.plans(found.rows)):
            return False
        self.absence, self._returned = None, self._returned + 1
        return True

    def for_ranks(self, watched: WatchedMover, move_seconds: float) -> tuple[OtherPlan, Speeds] | None:
        """Where ranks have changed their speeds and shares cannot make up for it: the plan that is enough faster."""
        plan, speeds = self._plan, watched.watch.speeds(STEADY)
        if plan is None or speeds is None or self.absence is not None:
            return None
        slowness = [1.0] * dist.get_world_size()
        for own, ranks in zip(speeds.slowness, watched.mover.ranks, strict=True):
            for rank in ranks:
                slowness[rank] = own
        known = self._chosen_for or (1.0,) * len(slowness)
        if all(1 / OTHER < now / then < OTHER for now, then in zip(slowness, known, strict=True)):
            return None
        alike, left = max(slowness) < ALIKE * min(slowness), speeds.seconds - speeds.ideal
        if alike and self._home is None:
            self._chosen_for = ()
            return None
        if not alike and left * self._rule.steps < PLANNING_SECONDS + move_seconds:
            return None  # even if nothing were left undone, looking for it would not pay
        self._chosen_for = tuple(slowness)
        answer = answer_for_ranks(plan, self._module.graph, slowness, self._home)
        if answer is None or not self._pays(answer, speeds.seconds, move_seconds):
            return None
        self._home = None if alike else self._home or plan
        changed = max(range(len(slowness)), key=lambda rank: abs(log(slowness[rank] / known[rank])))
        return answer, speeds._replace(slowness=tuple(slowness), rank=changed)

    @property
    def _plan(self) -> Plan | None:
        """The plan on one mesh that another could take the place of."""
        module = self._module
        known = module._options.judged_on is not None and module._stages.on_one_mesh
        return module.plan if known and self._optimizer is not None else None

    def _pays(self, answer: OtherPlan, step_seconds: float, move_seconds: float) -> bool:
        saved = 1 - answer.expected / answer.staying
        return saved >= self._rule.gain and step_seconds * saved * self._rule.steps >= answer.spent + move_seconds

    def for_links(self, links: LinkWatch, step_seconds: float, move_seconds: float) -> OtherPlan | None:
        """Where a link has changed: the plan for it that is enough faster than staying."""
        plan = self._plan
        if plan is None:
            return None
        ratio = links.changed(step_seconds)
        if ratio is None:
            return None
        links.restart()
        factor = max(self.slower * ratio, 1.0)
        answer = answer_for(plan, self._module.graph, factor)
        if answer is None or not self._pays(answer, step_seconds, move_seconds):
            return None
        self.slower = factor
        return answer
