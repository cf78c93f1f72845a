"""Accelerate's YAML (``accelerate config``), in and out: DDP, FSDP 1 and 2, its parallelism_config, DeepSpeed,
Megatron-LM.

The keys are those of the files that ``accelerate config`` writes (Apache-2.0). It says nothing about rows: the batch
is that of the training script, ``--batch`` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.exchange import deepspeed
from shardwright.exchange.configuration import (
    BLOCKS,
    GRADIENTS,
    LIGHT,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    Configuration,
    ConfigurationError,
    Keys,
    Remark,
    flattened,
)
from shardwright.files import read_text

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "": "float32"}
STRATEGIES = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
"""FSDP 1's strategies by the numbers that old files give them."""


def load(text: str, source: str) -> dict[str, Any]:
    """A YAML table."""
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(f"Reading {source} needs PyYAML.", "Run pip install pyyaml.") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ConfigurationError(
            f"{source} is not YAML: {' '.join(str(problem).split())}.", "Write it again."
        ) from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{source} is no configuration: it is no table.", "Is this the file that was meant?")
    return values


def read(path: str) -> Configuration:
    """The configuration in a file.

    >>> read("fsdp.yaml").shard                                                  # doctest: +SKIP
    8
    """
    return parse(load(read_text(path), path), path)


def parse(values: Mapping[str, Any], source: str) -> Configuration:
    """The configuration in a table."""
    keys = Keys(flattened(values), source)
    kind = keys.word("distributed_type", default="no").rpartition(".")[2]
    devices = keys.whole("num_processes")
    machines = keys.count("num_machines")
    precision = keys.word("mixed_precision", default="no")
    if precision not in PRECISIONS:
        keys.refuse("mixed_precision", "8-bit floats are no precision of ours", unless=())
        keys.unsupported.append(
            Remark("mixed_precision", precision, "8-bit floats are no precision of ours: bfloat16 is taken")
        )
        precision = "bf16"
    base = Configuration("accelerate", source, devices, precision=PRECISIONS[precision])
    sections = {
        "fsdp": _fsdp,
        "deepspeed": _deepspeed,
        "megatron_lm": _megatron,
        "no": lambda keys, base, machines: base,
    }
    if kind.startswith(("multi_",)):
        found = replace(base, replicate=devices)
    elif kind in sections:
        found = sections[kind](keys, base, machines)
    else:
        raise ConfigurationError(
            f"{source}: the kind {kind!r} is not read.", "Read are MULTI_GPU, FSDP, DEEPSPEED and MEGATRON_LM."
        )
    found = _degrees(keys, found)
    keys.refuse("downcast_bf16", "of TPUs only")
    for name in [name for name in keys.left if name.startswith(("dynamo_config.", "fp8_config."))]:
        keys.refuse(
            name,
            "8-bit floats are no precision of ours" if name.startswith("fp8") else "a flag of the compiler",
            unless=(),
        )
    keys.pass_over(
        "says where and how processes are started",
        *(
            "compute_environment",
            "machine_rank",
            "main_process",
            "main_training_function",
            "rdzv",
            "same_network",
            "num_cpu",
            "gpu_ids",
        ),
        *(
            "use_cpu",
            "enable_cpu_affinity",
            "debug",
            "tpu_",
            "commands",
            "command_file",
            "ipex_config",
            "mpirun_config",
            "downcast",
            "deepspeed_hostfile",
        ),
        *("distributed_type", "num_machines", "env", "parallelism_config"),
    )
    lists: dict[str, Any] = {name: (*getattr(found, name), *own) for name, own in keys.lists().items()}
    return replace(found, **lists)


def _degrees(keys: Keys, found: Configuration) -> Configuration:
    """The sizes of ``parallelism_config``, where there are any."""
    at = "parallelism_config.parallelism_config_"
    names = {
        "replicate": "dp_replicate_size",
        "shard": "dp_shard_size",
        "context": "cp_size",
        "tensor": "tp_size",
        "sequence": "sp_size",
    }
    sizes = {name: keys.whole(f"{at}{key}") for name, key in names.items() if f"{at}{key}" in keys.values}
    keys.pass_over("how a cut is carried out there", f"{at}cp_", f"{at}sp_")
    if not sizes:
        return found
    ulysses = sizes.pop("sequence", 1) or 1
    if ulysses > 1:
        sizes["context"] = (sizes.get("context") or 1) * ulysses
        keys.unsupported.append(
            Remark(
                f"{at}sp_size", str(ulysses), "heads for positions by all-to-all there: planned as context parallelism"
            )
        )
    given: dict[str, Any] = {name: size or 1 for name, size in sizes.items()}
    return replace(found, **{"replicate": 1, "shard": 1, **given})


def _fsdp(keys: Keys, base: Configuration, machines: int) -> Configuration:
    at = "fsdp_config.fsdp_"
    version = keys.count(f"{at}version")
    strategy = keys.word(f"{at}sharding_strategy", default="full_shard")
    strategy = STRATEGIES.get(strategy, strategy)
    again = keys.flag(f"{at}activation_checkpointing")
    reshard = keys.take(f"{at}reshard_after_forward", default="true")
    keys.refuse(f"{at}offload_params", "nothing is offloaded here")
    keys.pass_over("how FSDP wraps modules and keeps its state there", at)
    said = str(reshard).strip().lower()
    if said in ("shard_grad_op", "hybrid_shard_zero2", "no_shard", "hybrid_shard", "full_shard"):
        strategy = said
    freed = said not in ("false", "0", "no") if version == 2 else strategy in ("full_shard", "hybrid_shard")
    sizes: dict[str, Any] = {"replicate": 1, "shard": base.devices}
    if version != 2 and strategy.startswith("hybrid") and base.devices is not None:
        sizes = {"replicate": machines, "shard": max(base.devices // machines, 1)}
    if version != 2 and strategy == "no_shard":
        sizes = {"replicate": base.devices, "shard": 1}
    found = replace(base, **sizes, recompute=BLOCKS if again else NOTHING)
    return replace(found, sharding=PARAMETERS, reshard=freed)


def _deepspeed(keys: Keys, base: Configuration, machines: int) -> Configuration:
    at = "deepspeed_config."
    other = keys.take(f"{at}deepspeed_config_file")
    if other:
        there = Path(base.source).parent / str(other)
        if there.exists():
            found = deepspeed.read(str(there))
            keys.pass_over("how it is started", at)
            return replace(found, engine="accelerate", source=base.source, devices=base.devices)
        keys.unsupported.append(
            Remark(f"{at}deepspeed_config_file", str(other), "is not there: ZeRO's stage 0 is taken")
        )
    stage = keys.count(f"{at}zero_stage", default=0)
    for name in ("offload_optimizer_device", "offload_param_device"):
        keys.refuse(f"{at}{name}", deepspeed.OFFLOADED, unless=(None, "none", ""))
    accumulated = keys.whole(f"{at}gradient_accumulation_steps")
    keys.pass_over("how it is started, and how ZeRO is carried out there", at)
    sizes: dict[str, Any] = (
        {"replicate": base.devices, "shard": 1} if stage == 0 else {"replicate": 1, "shard": base.devices}
    )
    found = replace(base, **sizes, microbatches=accumulated)
    return replace(found, sharding=deepspeed.STAGES.get(stage, OPTIMIZER), reshard=stage == 3)


def _megatron(keys: Keys, base: Configuration, machines: int) -> Configuration:
    at = "megatron_lm_config.megatron_lm_"
    tensor, pipeline = keys.count(f"{at}tp_degree"), keys.count(f"{at}pp_degree")
    passes = keys.whole(f"{at}num_micro_batches")
    light = keys.flag(f"{at}recompute_activations")
    divided = keys.flag(f"{at}use_distributed_optimizer")
    sequence = keys.flag(f"{at}sequence_parallelism") and tensor > 1
    keys.pass_over("decides nothing about how the model is split", at)
    found = replace(
        base, replicate=1 if divided else None, shard=None if divided else 1, tensor=tensor, pipeline=pipeline
    )
    recompute = LIGHT if light else NOTHING
    return replace(
        found, microbatches=passes, sequence=sequence, sharding=OPTIMIZER, reshard=False, recompute=recompute
    )


def write(configuration: Configuration) -> str:
    """What ``accelerate launch --config_file`` reads: FSDP 2 where parameters are divided, DDP, DeepSpeed or
    Megatron-LM else.

    >>> "fsdp_version: 2" in write(Configuration("accelerate", shard=8))
    True
    """
    c = configuration
    precision = {name: short for short, name in PRECISIONS.items() if short}[c.precision]
    said = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": f"'{precision}'"}
    said |= {"num_processes": str(c.devices)} if c.devices else {}
    sharded = c.shard is None or c.shard > 1
    lines: list[str] = []
    if c.pipeline > 1:
        said["distributed_type"] = "MEGATRON_LM"
        lines = [
            "megatron_lm_config:",
            f"  megatron_lm_tp_degree: {c.tensor or 1}",
            f"  megatron_lm_pp_degree: {c.pipeline}",
        ]
        lines += [
            f"  megatron_lm_num_micro_batches: {c.microbatches or 1}",
            f"  megatron_lm_sequence_parallelism: {_yes(c.sequence)}",
        ]
        lines += [f"  megatron_lm_recompute_activations: {_yes(c.recompute != NOTHING)}"]
        lines += [f"  megatron_lm_use_distributed_optimizer: {_yes(sharded)}"]
    elif sharded and c.sharding in (OPTIMIZER, GRADIENTS):
        said["distributed_type"] = "DEEPSPEED"
        lines = ["deepspeed_config:", f"  zero_stage: {1 if c.sharding == OPTIMIZER else 2}"]
        lines += [f"  gradient_accumulation_steps: {c.microbatches or 1}"]
    elif sharded or (c.tensor or 1) > 1 or (c.context or 1) > 1:
        said["distributed_type"] = "FSDP"
        lines = ["fsdp_config:", "  fsdp_version: 2", "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"]
        lines += [f"  fsdp_reshard_after_forward: {_yes(c.reshard)}"]
        lines += [f"  fsdp_activation_checkpointing: {_yes(c.recompute == BLOCKS)}", "  fsdp_offload_params: false"]
        sizes = {"dp_replicate_size": c.replicate, "dp_shard_size": c.shard, "cp_size": c.context, "tp_size": c.tensor}
        if any((size or 1) > 1 for name, size in sizes.items() if name != "dp_shard_size"):
            lines += [
                "parallelism_config:",
                *(f"  parallelism_config_{name}: {size or 1}" for name, size in sizes.items()),
            ]
    else:
        said["distributed_type"] = "MULTI_GPU" if c.devices != 1 else "'NO'"
    return "\n".join([*(f"{name}: {value}" for name, value in said.items()), *lines]) + "\n"


def _yes(value: bool) -> str:
    return "true" if value else "false"
