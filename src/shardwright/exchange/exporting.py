"""A plan as another engine's file: the nearest configuration that it can run, what is lost on the way, and its price.

What is lost is lost twice: a plan may decide what no configuration says (:mod:`shardwright.exchange.recognising`), and a
configuration what this engine cannot do (:mod:`shardwright.exchange.expressing`). The price is that of the file as it was
written: read back, planned and simulated as ``plan --like`` does, beside the plan's own prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.exchange.configuration import Configuration, ConfigurationError, Remark
from shardwright.exchange.expressing import ENGINES, nearest
from shardwright.exchange.plain_pytorch_code import program
from shardwright.exchange.plain_pytorch_facts import facts_of
from shardwright.exchange.planning import plan_like
from shardwright.exchange.recognising import recognise
from shardwright.exchange.writing import SUFFIXES, parse, written
from shardwright.files import read_text, write
from shardwright.graph import Graph
from shardwright.planner import Options
from shardwright.plans import Plan

OTHER_NAMES = {"fsdp2": "pytorch"}
"""What people call an engine besides."""


@dataclass(frozen=True)
class Export:
    """A plan as a file of an engine.

    ``text`` is the file. ``lost``: what of the plan it does otherwise (``value`` is the plan's, ``why`` what there is
    instead); ``unsaid``: what the engine is told elsewhere, and where. ``priced`` is the plan that the file is when it is
    read back; where it cannot be planned, ``refusal`` says why.
    """

    engine: str
    text: str
    configuration: Configuration
    lost: tuple[Remark, ...]
    unsaid: tuple[Remark, ...]
    plan: Plan
    priced: Plan | None
    refusal: str = ""

    @property
    def price_seconds(self) -> float | None:
        """By how many seconds a step of the file is predicted to take longer than one of the plan."""
        if self.priced is None or not self.plan.prediction.step_seconds:
            return None
        return self.priced.prediction.step_seconds - self.plan.prediction.step_seconds

    @property
    def file_name(self) -> str:
        """What its file is called where nobody says."""
        return "parallelize.py" if self.engine == "pytorch" else f"{self.engine}.{SUFFIXES[self.engine]}"

    def save(self, path: str | Path) -> None:
        """Write the file.

        >>> shardwright.export(plan, to="torchtitan").save("job.toml")                          # doctest: +SKIP
        """
        write(path, self.text)

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "engine": self.engine,
            "file": self.text,
            "configuration": self.configuration.decisions(),
            "lost": [vars(remark) for remark in self.lost],
            "said_elsewhere": [vars(remark) for remark in self.unsaid],
            "plan": vars(self.plan.prediction),
            "priced": self.priced and vars(self.priced.prediction),
            "price_seconds": self.price_seconds,
            "refusal": self.refusal,
        }


def export(
    plan: Plan,
    *,
    to: str,
    base: str | Path | None = None,
    graph: Graph | None = None,
    price: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Export:
    """A plan as another engine's file, with what is lost on the way and what that is predicted to cost.

    Parameters
    ----------
    plan
        For training.
    to
        ``torchtitan``, ``megatron``, ``deepspeed``, ``accelerate``, ``hf``, or ``pytorch`` (also ``fsdp2``): code that
        runs on plain PyTorch.
    base
        A file of that engine, in which only what differs is changed: comments, order and all other keys stay.
    graph
        That of the model where the plan does not hold it.
    price
        Whether the file is read back and simulated.
    progress
        Called with a sentence when a stage begins.

    Returns
    -------
    Export
        The file's ``text``, what is ``lost``, and what it costs (``price_seconds``).

    Raises
    ------
    ConfigurationError
        Where the engine can express nothing of the plan: the message says why, the remedy names one that can.

    Examples
    --------
    >>> exported = shardwright.export(plan, to="torchtitan")                                    # doctest: +SKIP
    >>> print(*exported.lost, exported.price_seconds)                                           # doctest: +SKIP
    """
    say, engine = progress or (lambda text: None), OTHER_NAMES.get(to, to)
    if engine not in ENGINES:
        raise ConfigurationError(f"Plans are not exported to {to!r}.", f"Say --to {' | '.join(ENGINES)}.")
    if plan.serving is not None or not plan.signature.training:
        raise ConfigurationError(
            "The plan is for inference, and the configurations of these engines are about training.",
            "Export a plan that was made for training.",
        )
    graph = plan.graph() if graph is None else graph
    say("recognising the plan")
    recognised = recognise(plan, graph)
    found = nearest(recognised.configuration, engine)
    beside = None if base is None else read_text(base)
    lost = (*recognised.lost, *found.lost)
    text = written(found, beside, str(base or ""))
    if engine == "pytorch":
        facts, otherwise = facts_of(plan, graph, found.configuration)
        lost = (*lost, *otherwise)
        text = program(found.configuration, facts, plan.model or "A model", lost)
    priced, refusal = None, ""
    if price:
        say("pricing what was written")
        said = {remark.key: getattr(found.configuration, remark.key) for remark in found.unsaid}
        read = parse(text, engine, str(base or "what was written"))
        same = found.configuration.optimizer == recognised.configuration.optimizer
        optimizer = plan.optimizer if same else found.configuration.optimizer
        read = replace(read.on(plan.devices, found.configuration.batch), **said | {"optimizer": optimizer})
        asked = Options(memory_limit=plan.asked.memory_limit, batch_norm=plan.batch_norm)
        try:
            followed = plan_like(graph, plan.cluster, read, asked, progress=say, reference=plan.model)
            priced, lost = followed.plan, (*lost, *followed.remarks)
        except ShardwrightError as error:
            refusal = error.message
    return Export(engine, text, found.configuration, lost, found.unsaid, plan, priced, refusal)
