"""DeepSpeed's JSON, in and out (its keys: deepspeed.ai, "DeepSpeed Configuration JSON").

``train_batch_size`` is ``train_micro_batch_size_per_gpu`` × ``gradient_accumulation_steps`` × data-parallel ranks;
which may be left out, and ``auto`` is what the trainer fills in. ZeRO's stage says what those ranks divide;
``mics_shard_size`` divides among groups of ranks only. Activation checkpointing is switched on in the model's code,
the section only says how.
"""

from __future__ import annotations

import json
from typing import Any

from shardwright.exchange.configuration import (
    BLOCKS,
    GRADIENTS,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    Configuration,
    ConfigurationError,
    Keys,
    flattened,
)
from shardwright.files import read_json

STAGES = {1: OPTIMIZER, 2: GRADIENTS, 3: PARAMETERS}
OFFLOADED = "nothing is offloaded here"
QUANTIZED = "gradients and parameters travel as they are"


def read(path: str) -> Configuration:
    """The configuration in a file.

    >>> read("ds_config.json").sharding                                          # doctest: +SKIP
    'parameters'
    """
    values = read_json(path, ConfigurationError)
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{path} is no configuration of DeepSpeed: it is no table.", "Is this the file that was meant?"
        )
    return parse(values, path)


def parse(values: dict[str, Any], source: str) -> Configuration:
    """The configuration in a table."""
    keys, zero = Keys(flattened(values), source), "zero_optimization."
    stage = keys.count(f"{zero}stage", default=0)
    if stage not in (0, *STAGES):
        raise ConfigurationError(f"{source}: ZeRO has no stage {stage}.", "There are 0, 1, 2 and 3.")
    group = keys.whole(f"{zero}mics_shard_size", default=-1)
    grouped = stage == 3 and group is not None and group > 0
    tensor = keys.count("tensor_parallel.autotp_size", "tensor_parallel.tp_size")
    ulysses = keys.count("sequence_parallel_size")
    stages = keys.whole("pipeline.stages")
    half = keys.flag("bf16.enabled", "bfloat16.enabled")
    precise = keys.flag("fp16.enabled", "amp.enabled")
    optimizer = keys.word("optimizer.type", default="AdamW")
    if optimizer not in ("adam", "adamw", "sgd"):
        keys.refuse("optimizer.type", "priced as AdamW", unless=())

    for name in (
        "offload_optimizer.device",
        "offload_param.device",
        "cpu_offload",
        "cpu_offload_params",
        "cpu_offload_use_pin_memory",
    ):
        keys.refuse(f"{zero}{name}", OFFLOADED, unless=(None, "none", False, ""))
    keys.pass_over("how offloading is carried out", f"{zero}offload_", "aio.", "zenflow.")
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        keys.refuse(f"{zero}{name}", QUANTIZED)
    keys.refuse(f"{zero}zero_hpz_partition_size", "parameters have one resting layout, no second one", unless=(1,))
    for name, why in {
        "partition_activations": "saved activations lie as their operators make them",
        "cpu_checkpointing": OFFLOADED,
    }.items():
        keys.refuse(f"activation_checkpointing.{name}", why)
    for name in (
        "sparse_attention",
        "progressive_layer_drop",
        "curriculum_learning",
        "data_efficiency",
        "compression_training",
        "quantize_training",
    ):
        for key in [key for key in keys.left if key == name or key.startswith(f"{name}.")]:
            keys.refuse(key, "the model is captured as it is; this changes what it computes", unless=())
    keys.refuse("communication_data_type", "gradients are reduced in the parameters' dtype", unless=(None, "none"))
    keys.refuse("data_types.grad_accum_dtype", "gradients have the parameters' dtype", unless=(None, "none"))
    keys.pass_over("how ZeRO's buckets and buffers are laid out there", zero)
    keys.pass_over("it is switched on in the model's code", "activation_checkpointing.")
    keys.pass_over(
        "a factor, not a plan",
        "gradient_clipping",
        "prescale_gradients",
        "gradient_predivide_factor",
        "fp16.",
        "bf16.",
        "amp.",
    )
    keys.pass_over(
        "decides nothing about how the model is split",
        *(
            "optimizer.",
            "scheduler.",
            "steps_per_print",
            "wall_clock_breakdown",
            "dump_state",
            "zero_allow_untested",
            "zero_force",
        ),
        *(
            "tensorboard.",
            "wandb.",
            "csv_monitor.",
            "flops_profiler.",
            "comms_logger.",
            "checkpoint.",
            "elasticity.",
            "autotuning.",
        ),
        *(
            "sparse_gradients",
            "disable_allgather",
            "memory_breakdown",
            "seed",
            "dataloader_drop_last",
            "compile.",
            "data_types.",
            "pipeline.",
        ),
    )
    sharded = stage > 0
    degree: dict[str, Any] = {"replicate": 1, "shard": 1}
    degree["shard" if sharded else "replicate"] = None
    if grouped:
        degree = {"replicate": None, "shard": group}
    return Configuration(
        engine="deepspeed",
        source=source,
        **degree,
        context=ulysses,
        tensor=tensor,
        pipeline=stages or 1,
        sharding=STAGES.get(stage, OPTIMIZER),
        reshard=stage == 3,
        microbatch=keys.whole("train_micro_batch_size_per_gpu"),
        microbatches=keys.whole("gradient_accumulation_steps"),
        batch=keys.whole("train_batch_size"),
        recompute=NOTHING,
        precision="bfloat16" if half else "float16" if precise else "float32",
        optimizer="sgd" if optimizer == "sgd" else "adamw",
        **keys.lists(),
    )


def write(configuration: Configuration) -> str:
    """The sections that decide how a model is trained in parallel, as JSON.

    >>> json.loads(write(Configuration("deepspeed", shard=None, microbatch=2)))["zero_optimization"]["stage"]
    3
    """
    c = configuration
    sharded = c.shard is None or c.shard > 1
    stage = {what: number for number, what in STAGES.items()}[c.sharding] if sharded else 0
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    if sharded and stage == 3 and (c.replicate is None or c.replicate > 1):
        zero["mics_shard_size"] = c.shard
    said: dict[str, Any] = {"zero_optimization": zero}
    if c.batch:
        said["train_batch_size"] = c.batch
    if c.microbatch:
        said["train_micro_batch_size_per_gpu"] = c.microbatch
    if c.microbatches:
        said["gradient_accumulation_steps"] = c.microbatches
    said |= {"bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}}.get(c.precision, {})
    said["optimizer"] = {"type": "SGD" if c.optimizer == "sgd" else "AdamW", "params": {"lr": "auto"}}
    if c.tensor and c.tensor > 1:
        said["tensor_parallel"] = {"autotp_size": c.tensor}
    if c.context and c.context > 1:
        said["sequence_parallel_size"] = c.context
    if c.pipeline > 1:
        said["pipeline"] = {"stages": c.pipeline}
    if c.recompute == BLOCKS:
        said["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(said, indent=2) + "\n"
