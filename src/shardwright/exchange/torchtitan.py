"""torchtitan's TOML, in and out.

The keys are those of its ``job_config.py`` (BSD-3-Clause) of 2024 to 2025, with the names that older releases had for
them. Its later releases configure in Python, which is not read. A data-parallel rank takes ``local_batch_size`` rows
in one pass, in a pipeline ``pipeline_parallel_microbatch_size`` at a time; ``global_batch_size`` beyond that is
gradient accumulation. Tensor parallelism there always cuts norms along the sequence, and context-parallel ranks share
FSDP's shards.
"""

from __future__ import annotations

from typing import Any

from shardwright.cluster.toml_text import TOMLDecodeError, dumps, loads
from shardwright.exchange.configuration import (
    BLOCKS,
    LIGHT,
    NOTHING,
    PARAMETERS,
    Configuration,
    ConfigurationError,
    Keys,
    flattened,
)
from shardwright.files import read_text

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "loopedbfs": "breadth-first",
    "interleavedzerobubble": "zb-h1",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
"""Names of torch's schedules in small letters → ours."""

NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Our schedules as torch calls them."""

TWO_STAGES = ("interleaved-1f1b", "breadth-first", "zb-v", "dualpipe-v")
"""Schedules with two stages on a rank, unless layers per stage are said."""

FLOAT8 = "8-bit floats are no precision of ours"


def read(path: str) -> Configuration:
    """The configuration in a file.

    >>> read("llama3_8b.toml").shard is None                                     # doctest: +SKIP
    True
    """
    return parse(read_text(path), path)


def load(text: str, source: str) -> dict[str, Any]:
    """A TOML table."""
    try:
        values: dict[str, Any] = loads(text)
    except TOMLDecodeError as problem:
        raise ConfigurationError(f"{source} is not TOML: {problem}.", "Is this torchtitan's file?") from None
    return values


def parse(text: str, source: str) -> Configuration:
    """The configuration in a text."""
    values = load(text, source)
    keys = Keys(flattened(values), source)
    at = "parallelism."
    shard = keys.count(
        f"{at}data_parallel_shard_degree",
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",
        default=-1,
    )
    tensor = keys.count(f"{at}tensor_parallel_degree", "training.tensor_parallel_degree")
    pipeline = keys.count(
        f"{at}pipeline_parallel_degree", "experimental.pipeline_parallel_degree", "training.pipeline_parallel_degree"
    )
    context = keys.count(f"{at}context_parallel_degree", "experimental.context_parallel_degree")
    schedule, each = _schedule(keys, pipeline)
    local = keys.count("training.local_batch_size", "training.batch_size", default=8)
    total = keys.whole("training.global_batch_size", default=-1)
    passes = _rows_of_a_pass(keys, local, pipeline) if pipeline > 1 else local
    keys.pass_over("only pipelines have it", f"{at}pipeline_parallel_microbatch_size")
    reshard = keys.word(f"{at}fsdp_reshard_after_forward", default="default")
    recompute, share = _recomputation(keys)
    mixed = keys.word("training.mixed_precision_param", default="bfloat16")
    keys.refuse("training.enable_cpu_offload", "nothing is offloaded here")
    for name in ("model.converters", "parallelism.enable_async_tensor_parallel", "float8.enable_float8_linear"):
        keys.refuse(
            name,
            FLOAT8
            if name != "parallelism.enable_async_tensor_parallel"
            else "products do not overlap with their own collectives here",
        )
    keys.refuse(f"{at}expert_tensor_parallel_degree", "experts are not cut by features beside the others", unless=(1,))
    keys.refuse(f"{at}pipeline_parallel_schedule_csv", "say --schedule FILE.csv beside")
    keys.refuse("optimizer.early_step_in_backward", "the optimizer's step comes after the backward pass here")
    keys.pass_over("a flag of the compiler", "training.compile", "compile.", "parallelism.enable_compiled_autograd")
    keys.pass_over("how 8-bit floats are made, where they are switched on", "float8.", "quantize.", "mx.")
    keys.pass_over(
        "how a cut is carried out there",
        f"{at}context_parallel_rotate_method",
        f"{at}disable_loss_parallel",
        f"{at}enable_compiled",
    )
    keys.pass_over(
        "describes the model or its data", "model.", "training.dataset", "training.seed", "training.dataset_path"
    )
    keys.pass_over(
        "decides nothing about how the model is split",
        *(
            "job.",
            "profiling.",
            "metrics.",
            "lr_scheduler.",
            "checkpoint.",
            "validation.",
            "comm.",
            "fault_tolerance.",
            "debug.",
        ),
        *(
            "experimental.custom",
            "optimizer.",
            "training.steps",
            "training.max_norm",
            "training.warmup",
            "training.gc_",
        ),
        *("training.deterministic", "training.mixed_precision_reduce", "memory_estimation."),
    )
    return Configuration(
        engine="torchtitan",
        source=source,
        replicate=keys.count(f"{at}data_parallel_replicate_degree", "training.data_parallel_replicate_degree"),
        shard=None if shard == -1 else shard,
        context=context,
        tensor=tensor,
        sequence=tensor > 1,
        pipeline=pipeline,
        expert=keys.count(f"{at}expert_parallel_degree", "experimental.expert_parallel_degree"),
        sharding=PARAMETERS,
        reshard=pipeline == 1 if reshard == "default" else reshard == "always",
        schedule=schedule,
        stages_per_device=each,
        cuts=_cuts(keys),
        microbatch=passes,
        microbatches=None if total is not None and total > 0 else local // passes if passes else None,
        batch=total if total is not None and total > 0 else None,
        length=keys.whole("training.seq_len", default=2048),
        recompute=recompute,
        recomputed_share=share,
        precision=mixed,
        optimizer=_optimizer(keys),
        **keys.lists(),
    )


def _schedule(keys: Keys, pipeline: int) -> tuple[str, int]:
    name = keys.word(
        "parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule", default="1F1B"
    )
    keys.pass_over(
        "how many layers a stage has is told by its schedule here", "parallelism.pipeline_parallel_layers_per_stage"
    )
    if name not in SCHEDULES:
        raise ConfigurationError(
            f"{keys.source}: there is no schedule {name!r} here.", f"Known: {', '.join(NAMES.values())}."
        )
    if pipeline == 1:
        return "1f1b", 1
    return SCHEDULES[name], 2 if SCHEDULES[name] in TWO_STAGES else 1


def _rows_of_a_pass(keys: Keys, local: int, pipeline: int) -> int:
    """Rows that a pipeline takes at once; releases of 2024 said how many micro-batches there are, as many as stages
    by default."""
    if "experimental.pipeline_parallel_degree" in keys.values:
        return max(local // keys.count("experimental.pipeline_parallel_microbatches", default=pipeline), 1)
    return keys.count("parallelism.pipeline_parallel_microbatch_size")


def _cuts(keys: Keys) -> tuple[str, ...]:
    given = keys.take(
        "parallelism.pipeline_parallel_split_points", "experimental.pipeline_parallel_split_points", default=[]
    )
    return tuple(given.split(",")) if isinstance(given, str) and given else tuple(given or ())


def _recomputation(keys: Keys) -> tuple[str, float]:
    """What is recomputed: selective ``op`` keeps the results of products, a number n recomputes every n-th block
    whole."""
    mode = keys.word("activation_checkpoint.mode", "training.activation_checkpoint", default="selective")
    option = str(keys.take("activation_checkpoint.selective_ac_option", default="op"))
    keys.pass_over("how recomputation is carried out there", "activation_checkpoint.")
    if mode == "full":
        return BLOCKS, 1.0
    if mode == "none":
        return NOTHING, 1.0
    return (BLOCKS, 1.0 / int(option)) if option.isdigit() and int(option) else (LIGHT, 1.0)


def _optimizer(keys: Keys) -> str:
    name = keys.word("optimizer.name", default="AdamW")
    if name not in ("adamw", "adam", "sgd"):
        keys.refuse("optimizer.name", "priced as AdamW")
    return "sgd" if name == "sgd" else "adamw"


def write(configuration: Configuration) -> str:
    """The sections that decide how a model is trained in parallel, as TOML; the rest of a job's file stays as it is.

    >>> "tensor_parallel_degree = 2" in write(Configuration("torchtitan", shard=4, tensor=2, sequence=True, microbatch=1))
    True
    """
    c = configuration
    pipelined = c.pipeline > 1
    local = (c.microbatch or 1) * (c.microbatches or 1) if pipelined else (c.microbatch or 1)
    total = c.batch if c.batch is not None and not pipelined and (c.microbatches or 1) > 1 else -1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": c.replicate if c.replicate is not None else 1,
        "data_parallel_shard_degree": -1 if c.shard is None else c.shard,
        "fsdp_reshard_after_forward": "always" if c.reshard else "never",
        "tensor_parallel_degree": c.tensor or 1,
        "pipeline_parallel_degree": c.pipeline,
        "context_parallel_degree": c.context or 1,
        "expert_parallel_degree": c.expert,
    }
    if pipelined:
        parallelism |= {
            "pipeline_parallel_schedule": NAMES.get(c.schedule, "1F1B"),
            "pipeline_parallel_microbatch_size": c.microbatch or 1,
        }
        if c.cuts:
            parallelism["pipeline_parallel_split_points"] = list(c.cuts)
    again: dict[str, Any] = {"mode": {NOTHING: "none", LIGHT: "selective", BLOCKS: "full"}[c.recompute]}
    if c.recompute == LIGHT:
        again["selective_ac_option"] = "op"
    elif c.recompute == BLOCKS and c.recomputed_share < 1:
        again = {"mode": "selective", "selective_ac_option": str(round(1 / c.recomputed_share))}
    training = {"local_batch_size": local, "global_batch_size": total, "mixed_precision_param": c.precision}
    training |= {} if c.length is None else {"seq_len": c.length}
    optimizer = {"name": "SGD" if c.optimizer == "sgd" else "AdamW"}
    sections: dict[str, dict[str, Any]] = {
        "training": training,
        "optimizer": optimizer,
        "parallelism": parallelism,
        "activation_checkpoint": again,
    }
    return dumps(sections)
