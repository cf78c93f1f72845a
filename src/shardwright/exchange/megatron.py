"""Megatron-LM's command line, in and out.

The options are those of its ``arguments.py`` (the documentation prints them all). Data-parallel ranks are what the
devices leave; ``--use-distributed-optimizer`` divides the optimizer's state among them (ZeRO-1),
``--use-torch-fsdp2`` and Megatron's own FSDP divide parameters. ``--recompute-granularity selective`` recomputes
attention's scores, ``full`` whole layers.
"""

from __future__ import annotations

import shlex
from typing import Any

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
)
from shardwright.exchange.shell import command_words
from shardwright.files import read_text

MODEL = """
    num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention num-query-groups
    position-embedding-type max-position-embeddings rotary- use-rotary no-position-embedding swiglu squared-relu
    openai-gelu normalization norm-epsilon apply-layernorm-1p untie-embeddings disable-bias-linear add-qkv-bias
    attention-dropout hidden-dropout init-method qk-layernorm attention-backend use-flash-attn use-mcore-models
    use-legacy-models transformer-impl encoder- decoder- bert- vocab- make-vocab num-experts moe-
    multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim v-head-dim mtp- spec window-size embedding-init
    no-masked-softmax-fusion no-bias- bias- masked-softmax cross-entropy attention-softmax apply-query-key no-rope-
    mscale original-max
""".split()  # noqa: SIM905 - thirty lines less
"""Options that describe the model, by how they begin."""

ELSEWHERE = """
    lr min-lr decoupled- weight-decay adam- sgd-momentum clip-grad train-iters train-samples train-data exit- seed
    data- mock-data split merge-file tokenizer- tiktoken- save load log- tensorboard- wandb- eval- profile ckpt-
    no-load no-save distributed-timeout distributed-backend num-workers dataloader- no-create-attention-mask
    create-attention no-mmap manual-gc empty-unused no-check rampup-batch-size use-checkpoint finetune override-opt
    use-dist-ckpt auto-detect async-save dist-ckpt reset- eod- loss-scale initial-loss min-loss hysteresis
    calculate-per-token-loss start-weight end-weight check-for-nan no-check-for-nan start-iter timing-
    legacy-tokenizer per-split local-rank master node rdzv te-rng accumulate-allreduce-grads-in-fp32
    attention-softmax-in-fp32 no-one-logger enable-one-logger exp- one-logger skip-train straggler
""".split()  # noqa: SIM905 - thirty lines less
"""Options about learning rates, data, checkpoints and logs, by how they begin."""

ALWAYS = """
    overlap-grad-reduce overlap-param-gather overlap-p2p align-param-gather align-grad ddp-bucket-size
    ddp-num-buckets gradient-accumulation-fusion no-gradient-accumulation no-async-tensor
""".split()  # noqa: SIM905 - thirty lines less
"""Options about how traffic is hidden there; ours is hidden as the simulation shows."""

REFUSED = {
    "fp8-format": "8-bit floats are no precision of ours",
    "fp8-param-gather": "8-bit floats are no precision of ours",
    "cpu-offloading": "nothing is offloaded here",
    "cpu-offloading-num-layers": "nothing is offloaded here",
    "optimizer-cpu-offload": "nothing is offloaded here",
    "tp-comm-overlap": "products do not overlap with their own collectives here",
    "expert-tensor-parallel-size": "experts are not cut by features beside the others",
    "num-distributed-optimizer-instances": "optimizer state is divided among all data-parallel ranks",
    "grad-reduce-in-bf16": "gradients are reduced in the parameters' dtype",
    "use-precision-aware-optimizer": "optimizer state is kept in full precision",
    "main-grads-dtype": "gradients have the parameters' dtype",
    "standalone-embedding-stage": "stages are cut between blocks",
    "account-for-embedding-in-pipeline-split": "say where stages begin with --cut",
    "account-for-loss-in-pipeline-split": "say where stages begin with --cut",
    "decoder-first-pipeline-num-layers": "say where stages begin with --cut",
    "decoder-last-pipeline-num-layers": "say where stages begin with --cut",
    "pipeline-model-parallel-layout": "say where stages begin with --cut",
    "microbatch-group-size-per-virtual-pipeline-stage": "the order is the interleaved one",
    "deepspeed": "read the DeepSpeed configuration beside it",
    "delay-wgrad-compute": "the schedule says when weight gradients are computed",
    "cuda-graph-impl": "recorded when the plan runs, where that is safe",
    "enable-cuda-graph": "recorded when the plan runs, where that is safe",
    "external-cuda-graph": "recorded when the plan runs, where that is safe",
}


def read(path: str) -> Configuration:
    """The configuration in a launch script.

    >>> read("train_gpt3_175b_distributed.sh").pipeline                          # doctest: +SKIP
    16
    """
    return parse(read_text(path), path)


def options(words: list[str]) -> dict[str, Any]:
    """``--name value …`` as a table without the dashes; options without a value are true.

    >>> options(["x.py", "--fp16", "--lr", "1e-4", "--split=9,1"])
    {'fp16': True, 'lr': '1e-4', 'split': '9,1'}
    """
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = value or True
        elif word.endswith(".py"):
            name = ""  # what comes before it starts the processes
        elif name:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    return found


def parse(text: str, source: str) -> Configuration:
    """The configuration in a text."""
    given = options(command_words(text, source))
    if not given:
        raise ConfigurationError(
            f"{source} has no options of Megatron.", "Is this the script that launches the training?"
        )
    keys = Keys(given, source)
    tensor, pipeline = keys.count("tensor-model-parallel-size"), keys.count("pipeline-model-parallel-size")
    context, expert = keys.count("context-parallel-size"), keys.count("expert-model-parallel-size")
    nodes, each = keys.count("nnodes"), keys.whole("nproc-per-node")
    layers = keys.whole("num-layers", default=None) if "num-layers" in given else None
    sharding, shard = _sharding(keys)
    recompute, share = _recomputation(keys, layers, pipeline)
    virtual = _virtual(keys, layers, pipeline)
    half, precise = keys.flag("bf16"), keys.flag("fp16")
    optimizer = keys.word("optimizer", default="adam")
    for name, why in REFUSED.items():
        keys.refuse(name, why)
    sequence = keys.flag("sequence-parallel") and tensor > 1
    micro, batch = keys.whole("micro-batch-size"), keys.whole("global-batch-size")
    length = keys.whole("seq-length", "encoder-seq-length")
    keys.pass_over("describes the model", *MODEL)
    keys.pass_over("ours is hidden as the simulation shows", *ALWAYS)
    keys.pass_over("how 8-bit floats are made", "fp8-")
    keys.pass_over("how the ring of context parallelism is carried out there", "cp-comm-type", "hierarchical-context")
    keys.pass_over("decides nothing about how the model is split", *ELSEWHERE)
    return Configuration(
        engine="megatron",
        source=source,
        devices=None if each is None else nodes * each,
        replicate=1 if shard else None,
        shard=None if shard else 1,
        context=context,
        tensor=tensor,
        sequence=sequence,
        pipeline=pipeline,
        expert=expert,
        sharding=sharding,
        reshard=sharding == PARAMETERS,
        schedule="interleaved-1f1b" if virtual > 1 else "1f1b",
        stages_per_device=virtual,
        microbatch=micro,
        batch=batch,
        length=length,
        recompute=recompute,
        recomputed_share=share,
        precision="bfloat16" if half else "float16" if precise else "float32",
        optimizer="sgd" if optimizer == "sgd" else "adamw",
        **keys.lists(),
    )


def _sharding(keys: Keys) -> tuple[str, bool]:
    """What data-parallel ranks divide, and whether they divide anything."""
    own = keys.word("data-parallel-sharding-strategy")
    custom = keys.flag("use-custom-fsdp") | keys.flag("use-megatron-fsdp") | keys.flag("use-torch-fsdp2")
    distributed = keys.flag("use-distributed-optimizer")
    if custom:
        by_name = {
            "optim": OPTIMIZER,
            "optim-grads": GRADIENTS,
            "optim_grads": GRADIENTS,
            "no-shard": "",
            "no_shard": "",
        }
        divided = by_name.get(own, PARAMETERS)
        return divided or OPTIMIZER, bool(divided)
    return OPTIMIZER, distributed


def _recomputation(keys: Keys, layers: int | None, pipeline: int) -> tuple[str, float]:
    granularity = keys.word("recompute-granularity")
    method, count = keys.word("recompute-method"), keys.whole("recompute-num-layers")
    light = keys.flag("recompute-activations")
    keys.pass_over("of light recomputation it is the search here that says what is cheap", "recompute-modules")
    keys.refuse("distribute-saved-activations", "saved activations lie as their operators make them")
    if keys.flag("checkpoint-activations") or granularity == "full":
        share = min(count * pipeline / layers, 1.0) if method == "block" and count and layers else 1.0
        return BLOCKS, share
    return (LIGHT, 1.0) if light or granularity == "selective" else (NOTHING, 1.0)


def _virtual(keys: Keys, layers: int | None, pipeline: int) -> int:
    """Stages on each device."""
    several = keys.whole("num-virtual-stages-per-pipeline-rank")
    per_stage = keys.whole("num-layers-per-virtual-pipeline-stage")
    if several:
        return several
    if not per_stage or pipeline == 1:
        return 1
    if not layers or layers % (pipeline * per_stage):
        raise ConfigurationError(
            f"{keys.source}: {layers} layers are no stages of {per_stage} on {pipeline} ranks.",
            "Say --num-layers, a multiple of both.",
        )
    return layers // (pipeline * per_stage)


def write(configuration: Configuration) -> str:
    """The options that decide how a model is trained in parallel, one a line, to be put into a launch script.

    >>> "--tensor-model-parallel-size 2" in write(Configuration("megatron", replicate=None, tensor=2))
    True
    """
    c = configuration
    said: dict[str, Any] = {
        "tensor-model-parallel-size": c.tensor or 1,
        "pipeline-model-parallel-size": c.pipeline,
        "context-parallel-size": c.context or 1,
        "expert-model-parallel-size": c.expert,
    }
    if c.stages_per_device > 1:
        said["num-virtual-stages-per-pipeline-rank"] = c.stages_per_device
    said |= {"sequence-parallel": True} if c.sequence else {}
    divided = c.shard is None or c.shard > 1
    if divided and c.sharding == OPTIMIZER:
        said["use-distributed-optimizer"] = True
    elif divided:
        name = "optim_grads_params" if c.sharding == PARAMETERS else "optim_grads"
        said |= {"use-distributed-optimizer": True, "use-megatron-fsdp": True, "data-parallel-sharding-strategy": name}
    if c.microbatch:
        said["micro-batch-size"] = c.microbatch
    if c.batch:
        said["global-batch-size"] = c.batch
    if c.length:
        said["seq-length"] = c.length
    if c.recompute == BLOCKS:
        said |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif c.recompute == LIGHT:
        said["recompute-granularity"] = "selective"
    said |= {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}.get(c.precision, {})
    said |= {"optimizer": "sgd"} if c.optimizer == "sgd" else {}
    lines = [f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}" for name, value in said.items()]
    world = ["--nproc-per-node", str(min(c.devices, 8)), "--nnodes", str(max(c.devices // 8, 1))] if c.devices else []
    return " \\\n    ".join([" ".join(["torchrun", *world, "pretrain_gpt.py"]), *lines]) + "\n"
