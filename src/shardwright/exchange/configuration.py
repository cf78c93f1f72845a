"""A configuration as other engines write it, as one record: degrees, micro-batches, schedule, recomputation,
precision.

Every format is read into this record and written from it. It says what people decide by hand; which operator is cut
how follows from it (:mod:`shardwright.exchange.planning`). Whatever stands in a file and is not in the record is
listed with it, by what it means for a plan, so that nothing of a file is passed over in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.records import shown
from shardwright.schedules import RECIPES

OPTIMIZER, GRADIENTS, PARAMETERS = "optimizer", "gradients", "parameters"
"""What the ranks of ``shard`` divide among themselves: ZeRO's stages 1, 2 and 3, each with what those before it
divide."""

NOTHING, LIGHT, BLOCKS = "none", "light", "blocks"
"""What is recomputed in backward: nothing, of every block what is cheap to compute, or whole blocks."""

DEGREES = ("replicate", "shard", "context", "tensor")
"""The axes of a stage's mesh, slowest link first; one of them may be left open: what the devices leave for it."""


class ConfigurationError(ShardwrightError):
    """A configuration of another engine cannot be read, written or planned."""


@dataclass(frozen=True)
class Remark:
    """A key of a file, its value, and why it is not followed."""

    key: str
    value: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.key} = {self.value}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True)
class Configuration:
    """How an engine is told to train a model.

    ``replicate`` × ``shard`` × ``context`` × ``tensor`` × ``pipeline`` are all devices; one of the first four may be
    ``None``: what the devices leave over. ``sequence``: norms and the like are cut along the sequence on the tensor
    axis (Megatron's sequence parallelism). ``expert`` ranks, of those that share the batch, hold different experts.
    ``reshard``: gathered parameters are freed after forward. ``stages_per_device`` and ``cuts`` (modules before which
    stages begin) belong to the pipeline. ``microbatch``: rows that one data-parallel rank takes in one pass;
    ``microbatches``: passes of a step; ``batch``: rows of a step; two of them give the third. ``recomputed_share``:
    how many of the blocks are recomputed. ``modules``: module patterns and how they are cut on the tensor axis, where
    the file says so itself. ``unsupported`` changes speed or memory there and has no counterpart here, ``elsewhere``
    decides nothing that a plan decides, ``unknown`` are keys that were not understood.
    """

    engine: str
    source: str = ""
    devices: int | None = None
    replicate: int | None = 1
    shard: int | None = 1
    context: int | None = 1
    tensor: int | None = 1
    sequence: bool = False
    pipeline: int = 1
    expert: int = 1
    sharding: str = PARAMETERS
    reshard: bool = True
    schedule: str = "1f1b"
    stages_per_device: int = 1
    cuts: tuple[str, ...] = ()
    microbatch: int | None = None
    microbatches: int | None = None
    batch: int | None = None
    length: int | None = None
    recompute: str = NOTHING
    recomputed_share: float = 1.0
    precision: str = "float32"
    optimizer: str = "adamw"
    modules: tuple[tuple[str, str], ...] = ()
    unsupported: tuple[Remark, ...] = ()
    elsewhere: tuple[Remark, ...] = ()
    unknown: tuple[Remark, ...] = ()

    def __post_init__(self) -> None:
        open_degrees = [name for name in DEGREES if getattr(self, name) is None]
        if len(open_degrees) > 1:
            raise ConfigurationError(
                f"{self.source or 'The configuration'} leaves {' and '.join(open_degrees)} open.",
                "Say all degrees but one.",
            )
        counts = ("devices", *DEGREES, "pipeline", "expert", "stages_per_device", "microbatch", "microbatches", "batch")
        for name in counts:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigurationError(
                    f"{self.source or 'The configuration'} has {name} = {shown(value)}.", "It is a number from 1 on."
                )
        if self.schedule not in RECIPES:
            raise ConfigurationError(f"There is no schedule {self.schedule!r}.", f"Known: {', '.join(RECIPES)}.")
        if self.sharding not in (OPTIMIZER, GRADIENTS, PARAMETERS) or self.recompute not in (NOTHING, LIGHT, BLOCKS):
            raise ConfigurationError(
                f"There is no sharding of {self.sharding!r} or recomputation of {self.recompute!r}.",
                f"Known: {OPTIMIZER}, {GRADIENTS}, {PARAMETERS}; {NOTHING}, {LIGHT}, {BLOCKS}.",
            )

    def on(self, devices: int, batch: int | None = None) -> Configuration:
        """The same with every degree and count settled, for so many devices and (where it is given) so many rows a
        step.

        Raises
        ------
        ConfigurationError
            When the degrees do not make these devices, or the rows no whole micro-batches.

        Example
        -------
        >>> Configuration("torchtitan", shard=None, tensor=2, microbatch=4).on(8).batch
        16
        """
        known = [getattr(self, name) for name in DEGREES if getattr(self, name) is not None]
        taken = math.prod(known) * self.pipeline
        settled: dict[str, Any] = {}
        if devices % taken or (len(known) == len(DEGREES) and taken != devices):
            told = ", ".join(f"{name} {getattr(self, name) or 'open'}" for name in (*DEGREES, "pipeline"))
            raise ConfigurationError(
                f"{self.source or 'The configuration'} asks for {told}: that makes {taken} devices, not {devices}.",
                f"Say --cluster with {taken} devices, or change a degree.",
            )
        for name in DEGREES:
            if getattr(self, name) is None:
                settled[name] = devices // taken
        one = replace(self, devices=devices, **settled)
        data = one.data
        rows = batch or one.batch
        if rows is None:
            rows = (one.microbatch or 1) * (one.microbatches or 1) * data
        if one.microbatch is not None and batch is None and one.batch is None:
            count = one.microbatches or 1
        elif one.microbatch is not None and (batch is None or one.microbatches is None):
            count = max(rows // (one.microbatch * data), 1)
        else:
            count = one.microbatches or 1
        count = min(count, max(rows // data, 1))
        if rows % (count * data):
            raise ConfigurationError(
                f"{rows} rows are no {count} micro-batches on {data} data-parallel ranks.",
                f"Say --batch with a multiple of {count * data}.",
            )
        return replace(one, batch=rows, microbatches=count, microbatch=rows // (count * data))

    @property
    def data(self) -> int:
        """Over how many ranks the rows of a batch are divided; open degrees count as one."""
        return (self.replicate or 1) * (self.shard or 1)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes of a stage's mesh that have more than one rank (``shard`` of one where none has)."""
        found = tuple((name, getattr(self, name)) for name in DEGREES if (getattr(self, name) or 1) > 1)
        return found or (("shard", 1),)

    @property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_device

    def decisions(self) -> dict[str, Any]:
        """What it decides, without where it comes from and what was left out of it: equal decisions are equal plans."""
        about = {"engine", "source", "devices", "unsupported", "elsewhere", "unknown"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in about}

    def difference(self, other: Configuration) -> dict[str, tuple[Any, Any]]:
        """The decisions that differ, with both values."""
        mine, theirs = self.decisions(), other.decisions()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return asdict(self)

    def summary(self) -> str:
        """The decisions in a line.

        >>> Configuration("torchtitan", shard=8, tensor=2, microbatch=4, recompute="light").summary()
        'shard 8 (parameters) × tensor 2, micro-batches of 4, light recomputation, float32, adamw'
        """
        words = []
        for name in DEGREES:
            size = getattr(self, name)
            if size is None or size > 1:
                extra = {"shard": f" ({self.sharding})", "tensor": " with sequence" if self.sequence else ""}.get(
                    name, ""
                )
                words.append(f"{name} {'open' if size is None else size}{extra}")
        if self.pipeline > 1:
            each = f" × {self.stages_per_device} stages each" if self.stages_per_device > 1 else ""
            words.append(f"pipeline {self.pipeline}{each} ({self.schedule})")
        said = [" × ".join(words) or "one device"]
        said += [f"expert {self.expert}"] * (self.expert > 1)
        several = f"{self.microbatches} " if (self.microbatches or 1) > 1 else ""
        said += [f"{several}micro-batches of {self.microbatch}"] if self.microbatch else []
        said += [f"{self.batch} rows a step"] if self.batch else []
        if self.recompute != NOTHING:
            share = f" of {self.recomputed_share:.0%}" if self.recomputed_share < 1 else ""
            said.append(f"{'light' if self.recompute == LIGHT else 'whole'} recomputation{share}")
        return ", ".join([*said, self.precision, self.optimizer])


class Keys:
    """The keys of a file while they are read: each is taken once, and what nobody takes is unknown."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = dict(values), source
        self.left = dict.fromkeys(self.values)
        self.unsupported: list[Remark] = []
        self.elsewhere: list[Remark] = []

    def take(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these keys that is there; ``auto`` (what another program fills in) counts as none."""
        found = [name for name in names if name in self.values]
        for name in found:
            self.left.pop(name, None)
        value = self.values[found[0]] if found else default
        return default if value in ("auto", None) else value

    def whole(self, *names: str, default: int | None = None) -> int | None:
        """A whole number."""
        value = self.take(*names, default=default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        try:
            if float(value) == int(float(value)):
                return int(float(value))
        except (TypeError, ValueError, OverflowError):
            pass
        raise ConfigurationError(f"{self.source}: {names[0]} is {shown(value)}.", "Write a whole number.")

    def count(self, *names: str, default: int = 1) -> int:
        """A whole number that is there."""
        value = self.whole(*names, default=default)
        return default if value is None else value

    def flag(self, *names: str, default: bool = False) -> bool:
        """Yes or no, however it is written."""
        value = self.take(*names, default=default)
        if isinstance(value, str):
            return value.strip().lower() in ("true", "yes", "on", "1")
        return bool(value)

    def word(self, *names: str, default: str = "") -> str:
        """A word in small letters."""
        return str(self.take(*names, default=default)).strip().lower()

    def refuse(
        self, name: str, why: str, *, unless: Iterable[Any] = (None, False, 0, "", "none", "no", "false")
    ) -> None:
        """A key that changes speed or memory there and has no counterpart here, unless it is switched off."""
        if name not in self.values:
            return
        value = self.values[name]
        self.left.pop(name, None)
        quiet = value.lower() if isinstance(value, str) else value
        off = any(quiet == one and type(quiet) is type(one) for one in unless) or quiet == [] or quiet == {}
        (self.elsewhere if off else self.unsupported).append(Remark(name, shown(value), "switched off" if off else why))

    def pass_over(self, why: str, *prefixes: str) -> None:
        """Keys (by how they begin) that decide nothing that a plan decides."""
        for name in [name for name in self.left if name.startswith(prefixes)]:
            self.left.pop(name)
            self.elsewhere.append(Remark(name, shown(self.values[name]), why))

    def lists(self) -> dict[str, Any]:
        """The three lists of a record."""
        return {
            "unsupported": tuple(self.unsupported),
            "elsewhere": tuple(self.elsewhere),
            "unknown": tuple(Remark(name, shown(self.values[name])) for name in self.left),
        }


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flattened({"training": {"steps": 10}})
    {'training.steps': 10}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        found |= flattened(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found
