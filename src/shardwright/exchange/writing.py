"""Configurations as files of their engines: from nothing, or from the engine's own file with only what differs changed.

Whatever is written is read back before it is given away, and says what was to be said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardwright.exchange import accelerate, deepspeed, editing, hugging_face, megatron, plain_pytorch, torchtitan
from shardwright.exchange.configuration import Configuration, ConfigurationError, flattened
from shardwright.exchange.expressing import Nearest, canonical, nearest
from shardwright.exchange.shell import command_words

Writer = Callable[[Configuration], str]

WRITERS: dict[str, Writer] = {
    "torchtitan": torchtitan.write,
    "megatron": megatron.write,
    "deepspeed": deepspeed.write,
    "accelerate": accelerate.write,
    "pytorch": plain_pytorch.table,
    "hf": hugging_face.write,
}
"""By the engine's name."""

SUFFIXES = {
    "torchtitan": "toml",
    "megatron": "sh",
    "deepspeed": "json",
    "accelerate": "yaml",
    "pytorch": "py",
    "hf": "json",
}


def parse(text: str, engine: str, source: str = "the written file") -> Configuration:
    """The configuration in a text of an engine's file.

    >>> parse('{"zero_optimization": {"stage": 2}}', "deepspeed").sharding
    'gradients'
    """
    if engine == "torchtitan":
        return torchtitan.parse(text, source)
    if engine == "megatron":
        return megatron.parse(text, source)
    if engine == "accelerate":
        return accelerate.parse(accelerate.load(text, source), source)
    if engine == "pytorch":
        return plain_pytorch.parse(text, source)
    values = json.loads(text)
    return deepspeed.parse(values, source) if engine == "deepspeed" else hugging_face.of_plan(values["tp_plan"], source)


def written(found: Nearest, beside: str | None = None, source: str = "") -> str:
    """A configuration as a file of its engine; with ``beside``, the text of such a file
    (``source``: where it lies), only what differs is changed.

    Raises
    ------
    ConfigurationError
        When the text cannot be changed so that it says that.

    Examples
    --------
    >>> found = nearest(Configuration("plan", devices=2, shard=2, batch=2, microbatch=1, microbatches=1), "deepspeed")
    >>> print(written(found, '{"seed": 7, "zero_optimization": {"stage": 1}}'))
    {"seed": 7, "zero_optimization": {"stage": 3}}
    """
    engine, said = found.configuration.engine, found.in_file
    right = _says(found, source)
    text = WRITERS[engine](said)
    if beside is not None:
        text = beside if right(beside) else _changed(beside, text, engine, right)
    if not right(text):
        where = "The file it was to be changed in" if beside is not None else "What was written"
        raise ConfigurationError(
            f"{where} does not say {said.summary()} when it is read back.",
            "Export without --base, and put in what it says." if beside is not None else "Tell us: it is our mistake.",
        )
    return text


def _says(found: Nearest, source: str) -> Callable[[str], bool]:
    """Whether a text says a configuration, on the same devices and with the same rows."""
    wanted, engine = found.configuration, found.configuration.engine
    unsaid = {remark.key for remark in found.unsaid}
    devices, batch = wanted.devices or 1, wanted.batch

    def right(text: str) -> bool:
        try:
            told = parse(text, engine, source or "the written file")
            read = canonical(nearest(told.on(devices, batch), engine).configuration)
        except ConfigurationError:
            return False
        differences = read.difference(canonical(wanted))
        if told.devices not in (None, devices):
            return False
        return not differences.keys() - unsaid - ({"length"} if wanted.length is None else set())

    return right


def _changed(beside: str, text: str, engine: str, right: Callable[[str], bool]) -> str:
    if engine == "pytorch":
        raise ConfigurationError("A parallelize.py is written whole.", "Leave --base out.")
    table: dict[str, Any]
    if engine == "torchtitan":
        table, apply = flattened(torchtitan.load(text, "")), editing.toml
        table |= {name: None for name in TORCHTITAN if name not in table}
        theirs = flattened(torchtitan.load(beside, ""))
        older = {name: next((old for old in OLDER.get(name, ()) if old in theirs), name) for name in table}
        table = {name if name in theirs else older[name]: value for name, value in table.items()}
    elif engine == "megatron":
        table, apply = megatron.options(command_words(text, "")), editing.shell
        table |= {name: None for name in MEGATRON if name not in table}
        return editing.least(beside, {(name,): value for name, value in table.items()}, apply, right)
    elif engine == "accelerate":
        table, apply = {**_as_written(text)}, editing.yaml
        former = accelerate.load(beside, "").get("distributed_type")
        if str(former) != table["distributed_type"].strip("'"):
            beside = editing.yaml(beside, {(one,): None for one in SECTIONS})
        absent = [one for one in ACCELERATE if not any(name.startswith(one) for name in table)]
        table |= {name: None for name in absent if name.partition(".")[0] in beside}
    else:
        table, apply = flattened(json.loads(text)), editing.json_text
        if engine == "hf":
            values = json.loads(text)
            return editing.json_text(beside, {("tp_plan",): values["tp_plan"]})
        table |= {name: None for name in DEEPSPEED if name not in table}
    return editing.least(beside, {tuple(name.split(".")): value for name, value in table.items()}, apply, right)


def _as_written(text: str) -> dict[str, str]:
    """The keys of what :func:`accelerate.write` writes with their values as they stand there."""
    found: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        name, _, value = line.strip().partition(":")
        if not value.strip():
            section = name
        else:
            found[f"{section}.{name}" if line.startswith(" ") else name] = value.strip()
    return found


OLDER = {
    "parallelism.data_parallel_shard_degree": (
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",
    ),
    "parallelism.data_parallel_replicate_degree": ("training.data_parallel_replicate_degree",),
    "parallelism.tensor_parallel_degree": ("training.tensor_parallel_degree",),
    "parallelism.pipeline_parallel_degree": (
        "experimental.pipeline_parallel_degree",
        "training.pipeline_parallel_degree",
    ),
    "parallelism.pipeline_parallel_schedule": ("experimental.pipeline_parallel_schedule",),
    "parallelism.pipeline_parallel_split_points": ("experimental.pipeline_parallel_split_points",),
    "parallelism.context_parallel_degree": ("experimental.context_parallel_degree",),
    "training.local_batch_size": ("training.batch_size",),
    "activation_checkpoint.mode": ("training.activation_checkpoint",),
}
"""Keys of torchtitan's files and what older releases, whose files are still about, called them."""

TORCHTITAN = (
    "parallelism.pipeline_parallel_split_points",
    "parallelism.pipeline_parallel_schedule",
    "activation_checkpoint.selective_ac_option",
)
MEGATRON = """
    sequence-parallel use-distributed-optimizer use-megatron-fsdp use-torch-fsdp2 data-parallel-sharding-strategy
    recompute-granularity recompute-method recompute-num-layers recompute-activations fp16 bf16
    num-virtual-stages-per-pipeline-rank num-layers-per-virtual-pipeline-stage
""".split()  # noqa: SIM905 - ten lines less
DEEPSPEED = (
    "zero_optimization.mics_shard_size",
    "tensor_parallel",
    "sequence_parallel_size",
    "pipeline.stages",
    "bf16.enabled",
    "fp16.enabled",
)
SECTIONS = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config")
ACCELERATE = (
    "parallelism_config",
    "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.fsdp_activation_checkpointing",
)
"""Keys that are taken away where they say something else."""
