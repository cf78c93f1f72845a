"""What every engine can be told, and the nearest of it to a configuration; what is lost on the way is listed.

One table (:data:`ENGINES`) of facts from the engines' documentation; one walk over the fields. The nearest configuration
keeps the model on the same devices and trains it with the same rows a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardwright.exchange import torchtitan
from shardwright.exchange.configuration import (
    BLOCKS,
    GRADIENTS,
    LIGHT,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    Configuration,
    ConfigurationError,
    Remark,
)

ROWS = ("microbatch", "microbatches", "batch")


@dataclass(frozen=True)
class Engine:
    """What an engine's configuration can say.

    ``sharding``: what ranks of ``shard`` may divide; ``kept``: gathered parameters may stay until backward; ``hybrid``:
    replicas of groups of shards. ``sequence``: whether norms may be cut along the sequence with ``tensor``
    (``free``), always are (``always``) or never (``never``). ``per_device``: how many stages a device has under the
    schedules with several. ``shares``: some of the blocks may be recomputed. ``unsaid`` are fields that its file does
    not hold: where they are said instead.
    """

    title: str
    sharding: tuple[str, ...] = (PARAMETERS,)
    kept: bool = True
    hybrid: bool = True
    context: bool = True
    tensor: bool = True
    sequence: str = "free"
    schedules: tuple[str, ...] = ()
    per_device: int | None = None
    cuts: bool = False
    expert: bool = False
    recompute: tuple[str, ...] = (BLOCKS,)
    shares: bool = False
    precision: tuple[str, ...] = ("float32", "bfloat16", "float16")
    optimizers: tuple[str, ...] = ("adamw", "sgd")
    modules: bool = False
    unsaid: tuple[tuple[str, str], ...] = ()


TRAINER = "the training script says it: per_device_train_batch_size and gradient_accumulation_steps of Trainer"

ENGINES: dict[str, Engine] = {
    "torchtitan": Engine(
        "torchtitan",
        sequence="always",
        schedules=tuple(torchtitan.NAMES),
        per_device=2,
        cuts=True,
        expert=True,
        recompute=(LIGHT, BLOCKS),
        shares=True,
        precision=("float32", "bfloat16"),
        optimizers=("adamw",),
    ),
    "megatron": Engine(
        "Megatron-LM",
        sharding=(OPTIMIZER, GRADIENTS, PARAMETERS),
        kept=False,
        hybrid=False,
        schedules=("1f1b", "interleaved-1f1b"),
        expert=True,
        recompute=(LIGHT, BLOCKS),
    ),
    "deepspeed": Engine(
        "DeepSpeed",
        sharding=(OPTIMIZER, GRADIENTS, PARAMETERS),
        kept=False,
        sequence="never",
        schedules=("1f1b",),
        recompute=(),
        unsaid=(("length", "the model's configuration or the tokenizer says it"),),
    ),
    "accelerate": Engine(
        "accelerate",
        sequence="never",
        optimizers=("adamw", "sgd"),
        unsaid=(
            *((name, TRAINER) for name in ROWS),
            ("length", "the tokenizer or the data set says it"),
            ("optimizer", "the training script makes it"),
        ),
    ),
    "pytorch": Engine(
        "plain PyTorch",
        context=False,
        schedules=tuple(name for name in torchtitan.NAMES if name in ("gpipe", "1f1b")),
        cuts=True,
        shares=True,
        precision=("float32", "bfloat16"),
        modules=True,
    ),
    "hf": Engine(
        "transformers' tp_plan",
        sharding=(),
        context=False,
        sequence="never",
        recompute=(),
        modules=True,
        unsaid=(
            *((name, TRAINER) for name in ROWS),
            ("length", "the tokenizer or the data set says it"),
            ("precision", "from_pretrained(dtype=…) says it"),
            ("optimizer", "the training script makes it"),
        ),
    ),
}
"""By the names that ``export --to`` takes."""

ZERO_IN_ACCELERATE = replace(
    ENGINES["accelerate"],
    sharding=(OPTIMIZER,),
    kept=False,
    hybrid=False,
    context=False,
    tensor=False,
    recompute=(),
    unsaid=tuple((name, why) for name, why in ENGINES["accelerate"].unsaid if name != "microbatches"),
)
"""Accelerate hands ZeRO's first stage to DeepSpeed."""

DDP_IN_ACCELERATE = replace(ENGINES["accelerate"], recompute=())
"""And what is not divided at all to DDP, of which its file says nothing more."""

PIPELINES_IN_ACCELERATE = replace(
    ENGINES["accelerate"],
    sharding=(OPTIMIZER,),
    kept=False,
    hybrid=False,
    context=False,
    sequence="free",
    schedules=("1f1b",),
    recompute=(LIGHT,),
    unsaid=ZERO_IN_ACCELERATE.unsaid,
)
"""And pipelines to Megatron-LM."""


@dataclass(frozen=True)
class Nearest:
    """The nearest configuration that an engine can run; ``lost``: what it does otherwise; ``unsaid``: what its file does
    not hold, and where that is said."""

    configuration: Configuration
    lost: tuple[Remark, ...]
    unsaid: tuple[Remark, ...]

    @property
    def in_file(self) -> Configuration:
        """What the engine's file says of it."""
        plain = Configuration(self.configuration.engine)
        return replace(self.configuration, **{r.key: getattr(plain, r.key) for r in self.unsaid})


def engine_named(name: str, configuration: Configuration | None = None) -> Engine:
    """The facts about an engine, for accelerate about that behind which it stands.

    >>> engine_named("megatron").schedules
    ('1f1b', 'interleaved-1f1b')
    """
    if name not in ENGINES:
        raise ConfigurationError(f"Plans are not exported to {name!r}.", f"Say --to {' | '.join(ENGINES)}.")
    c = configuration
    if name != "accelerate" or c is None:
        return ENGINES[name]
    if c.pipeline > 1:
        return PIPELINES_IN_ACCELERATE
    cut = max(c.tensor or 1, c.context or 1) > 1
    if (c.shard or 2) > 1 and not cut and c.sharding == OPTIMIZER:
        return ZERO_IN_ACCELERATE
    return DDP_IN_ACCELERATE if c.shard == 1 and not cut else ENGINES[name]


def canonical(configuration: Configuration) -> Configuration:
    """The same decisions in one form: what has no meaning at a degree of one is as where nothing is said, and gathered
    parameters that stay until backward are ZeRO's second stage however an engine calls it.

    >>> canonical(Configuration("pytorch", shard=2, reshard=False)).sharding
    'gradients'
    """
    c = configuration
    changes: dict[str, Any] = {}
    if c.shard == 1:
        changes |= {"sharding": PARAMETERS, "reshard": True}
    elif not c.reshard or c.sharding != PARAMETERS:
        changes |= {"sharding": GRADIENTS if c.sharding == PARAMETERS else c.sharding, "reshard": False}
    if c.pipeline == 1:
        changes |= {"schedule": "1f1b", "stages_per_device": 1, "cuts": ()}
    if c.tensor == 1:
        changes |= {"sequence": False, "modules": ()}
    if c.recompute != BLOCKS:
        changes["recomputed_share"] = 1.0
    return replace(c, **changes)


def nearest(configuration: Configuration, engine: str) -> Nearest:
    """The nearest configuration that an engine can run on the same devices.

    Parameters
    ----------
    configuration
        With every degree settled (:meth:`~shardwright.exchange.Configuration.on`).

    Raises
    ------
    ConfigurationError
        When there is nothing near: the message says which engine could.

    Examples
    --------
    >>> c = Configuration("plan", devices=8, shard=8, sharding="optimizer", reshard=False)
    >>> print(*nearest(c, "torchtitan").lost)
    sharding = optimizer: parameters too, kept from forward to backward: torchtitan divides nothing less
    """
    return _Walk(canonical(configuration), engine).done()


class _Walk:
    """From a configuration to the nearest, field by field."""

    def __init__(self, c: Configuration, name: str) -> None:
        self.c, self.name = c, name
        self.engine = engine_named(name, c)
        self.lost: list[Remark] = []

    def done(self) -> Nearest:
        for step in (self._only_tensor, self._pipeline, self._context, self._tensor, self._sharding, self._rest):
            step()
            self.engine = engine_named(self.name, self.c)
        found = replace(canonical(self.c), engine=self.name)
        if self.name not in ("deepspeed", "megatron"):
            found = _as_kept(found) if PARAMETERS in self.engine.sharding else found
        unsaid = tuple(
            Remark(name, str(getattr(found, name)), why)
            for name, why in self.engine.unsaid
            if getattr(found, name) != getattr(Configuration(self.name), name)
        )
        return Nearest(found, tuple(self.lost), unsaid)

    def _change(self, key: str, instead: str, **fields: Any) -> None:
        value = getattr(self.c, key)
        if all(getattr(self.c, name) == new for name, new in fields.items()):
            return
        self.lost.append(Remark(key, str(value), instead))
        self.c = replace(self.c, **fields)

    def _only_tensor(self) -> None:
        if self.name != "hf":
            return
        c = self.c
        if c.tensor == 1 or not c.modules:
            raise ConfigurationError(
                "The plan cuts no weights by features, and a tp_plan says nothing else.",
                "Say --to accelerate or --to pytorch.",
            )
        ways = [(name, size) for name, size in (("replicate", c.replicate), ("shard", c.shard), ("context", c.context))]
        for name, size in [*ways, ("pipeline", c.pipeline)]:
            if size and size > 1:
                self._change(name, f"tensor {(self.c.tensor or 1) * size}: a tp_plan is for all devices",
                             **{name: 1, "tensor": (self.c.tensor or 1) * size})  # fmt: skip
        self._passes_of_one_rank()

    def _passes_of_one_rank(self) -> None:
        """The same rows a step where degrees have changed."""
        c = self.c
        if not c.batch:
            return
        passes = min(c.microbatches or 1, max(c.batch // c.data, 1))
        while c.batch % (passes * c.data) and passes > 1:
            passes -= 1
        if c.batch % (passes * c.data):
            raise ConfigurationError(
                f"{c.batch} rows a step are no equal pieces for {c.data} ranks of {self.engine.title}.",
                f"Plan with a multiple of {c.data} rows.",
            )
        self.c = replace(c, microbatches=passes, microbatch=c.batch // (passes * c.data))

    def _newly_divided(self, before: Configuration) -> None:
        """What ranks divide that divided nothing before."""
        if before.shard == 1:
            self.c = replace(self.c, sharding=PARAMETERS, reshard=True)

    def _pipeline(self) -> None:
        c, engine = self.c, self.engine
        if c.pipeline == 1:
            return
        if not engine.schedules:
            self._change(
                "pipeline", f"shard {c.pipeline} times as large: {engine.title} has no pipelines",
                pipeline=1, shard=(c.shard or 1) * c.pipeline, cuts=(), schedule="1f1b", stages_per_device=1,
            )  # fmt: skip
            self._newly_divided(c)
            return self._passes_of_one_rank()
        if c.schedule not in engine.schedules:
            several = c.stages_per_device > 1 and "interleaved-1f1b" in engine.schedules
            instead = "interleaved-1f1b" if several else "1f1b"
            each = c.stages_per_device if several else 1
            self._change("schedule", f"{instead}: {engine.title} knows {', '.join(engine.schedules)}", schedule=instead)
            if each != c.stages_per_device:
                self._change("stages_per_device", f"{each}: {instead} has as many", stages_per_device=each, cuts=())
        self._stages_each()
        if self.c.cuts and not engine.cuts:
            self._change("cuts", f"as many blocks in every stage: {engine.title} is told no modules", cuts=())

    def _stages_each(self) -> None:
        engine, c = self.engine, self.c
        if self.name != "torchtitan":
            return
        each = 2 if c.schedule in torchtitan.TWO_STAGES else 1
        if c.stages_per_device != each:
            cuts = ()
            self._change(
                "stages_per_device", f"{each} under {c.schedule} in {engine.title}", stages_per_device=each, cuts=cuts
            )

    def _context(self) -> None:
        size = self.c.context or 1
        if size > 1 and not self.engine.context:
            why = f"shard {size} times as large: {self.engine.title} cuts no sequences"
            before = self.c
            self._change("context", why, context=1, shard=(self.c.shard or 1) * size)
            self._newly_divided(before)
            self._passes_of_one_rank()
        if self.c.expert > 1 and not self.engine.expert:
            self._change("expert", f"1: {self.engine.title} is told of experts in the model's code", expert=1)

    def _tensor(self) -> None:
        c, engine = self.c, self.engine
        if (c.tensor or 1) > 1:
            if engine.sequence == "always":
                self._change("sequence", f"norms along the sequence too: {engine.title} always does", sequence=True)
            elif engine.sequence == "never":
                self._change("sequence", f"norms on every rank alike: {engine.title} cuts no norms", sequence=False)
        if not engine.modules:
            self.c = replace(self.c, modules=())  # the engine has its own list for every model it knows

    def _sharding(self) -> None:
        c, engine, title = self.c, self.engine, self.engine.title
        if c.shard == 1:
            return
        if c.sharding not in engine.sharding:
            kept = c.sharding == OPTIMIZER or c.sharding == GRADIENTS
            if kept and PARAMETERS in engine.sharding and engine.kept:
                self.c = replace(c, sharding=GRADIENTS, reshard=False)
                if c.sharding == OPTIMIZER:
                    why = f"parameters too, kept from forward to backward: {title} divides nothing less"
                    self.lost.append(Remark("sharding", c.sharding, why))
            elif engine.sharding:
                other = engine.sharding[-1]
                self._change("sharding", f"{other}: {title} divides nothing more here", sharding=other, reshard=False)
        c = self.c
        if self.name == "deepspeed" and c.sharding == PARAMETERS and max(c.tensor or 1, c.pipeline) > 1:
            why = "tensor parallelism" if (c.tensor or 1) > 1 else "pipelines"
            self._change("sharding", f"gradients: ZeRO-3 there is not for {why}", sharding=GRADIENTS, reshard=False)
        if self.name == "deepspeed" and self.c.sharding == GRADIENTS and c.pipeline > 1:
            self._change("sharding", "optimizer: ZeRO-2 there is not for pipelines", sharding=OPTIMIZER, reshard=False)
        hybrid = engine.hybrid and (self.name != "deepspeed" or self.c.sharding == PARAMETERS)
        if (self.c.replicate or 1) > 1 and not hybrid:
            size = (self.c.shard or 1) * (self.c.replicate or 1)
            self._change("replicate", f"shard {size}: {title} divides among all of them", replicate=1, shard=size)

    def _rest(self) -> None:
        c, engine = self.c, self.engine
        if c.recompute not in (NOTHING, *engine.recompute):
            instead = NOTHING if not engine.recompute else engine.recompute[-1]
            remedy = "" if engine.recompute else "; the model's own gradient_checkpointing_enable() switches it on"
            self._change("recompute", f"{instead}: {engine.title} has no other{remedy}", recompute=instead)
        share = self.c.recomputed_share
        if self.c.recompute == BLOCKS and share < 1:
            near = 1 / max(round(1 / share), 1) if engine.shares else 1.0
            if self.name == "pytorch":
                near = share
            self._change("recomputed_share", f"{near:.0%}: {engine.title} says no other share", recomputed_share=near)
        if c.precision not in engine.precision:
            self._change("precision", f"bfloat16: {engine.title} has no other half", precision="bfloat16")
        if c.optimizer not in engine.optimizers:
            self._change("optimizer", f"adamw: {engine.title} has no other", optimizer="adamw")


def _as_kept(c: Configuration) -> Configuration:
    """ZeRO's second stage as engines of FSDP say it."""
    return replace(c, sharding=PARAMETERS, reshard=False) if c.sharding == GRADIENTS else c
