"""What another engine holds otherwise than the plan that follows its file: facts of that engine, no constants.

torchtitan with pipelines, from torch's ``PipelineStage`` (``torch/distributed/pipelining/stage.py``) and FSDP2
(``torch/distributed/fsdp/_fully_shard``): before every pass back but the last it calls ``set_reshard_after_backward(False)``
and ``set_requires_gradient_sync(False)``, and torchtitan's ``fsdp_reshard_after_forward`` "default" is "never" where there
are pipelines. So parameters that were gathered once stay whole until the last pass back, and gradients are added up whole;
FSDP2 keeps these sums in ``reduce_dtype`` (``to_accumulated_grad_if_needed``), which torchtitan sets to float32. Our own
plan gathers for every pass, and adds up in the dtype of the model.

torchtitan's selective recomputation by operators (``distributed/activation_checkpoint.py``) keeps the input of a block, the
results of attention, and of its products every second one, the first among them. What ours recomputes "lightly" keeps the
results of all of them but the last, and the sum before the second half; theirs keeps the last product instead, as large.

torchtitan in mixed precision, from FSDP2 (``_fsdp_param.py``, ``all_gather_inputs``): parameters rest in float32 alone, and
their shards become half precision only on their way into an all-gather. Our own plan keeps both.

Context parallelism of every engine that is read here divides the positions of a sequence: a rank holds its own ones of all
that is computed, attends to the keys and values of all (which pass around a ring, are gathered, or come for some of the
heads by an all-to-all), and never has scores of more than a tile. So a device holds what one has whose rows are so much
shorter and as many times more; parameters that are divided are divided over these ranks too (torchtitan's and accelerate's
mesh ``dp_shard_cp``, Megatron's and DeepSpeed's groups of data with context). torch's ring gathers all keys and values of
one attention by default (``_AllGatherRotater`` in ``torch/distributed/tensor/experimental/_attention.py``); that is what
is counted of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.costs.optimizer import optimizer
from shardwright.costs.passes import gradient_bytes
from shardwright.exchange.configuration import LIGHT, PARAMETERS, Configuration
from shardwright.fitting.ways import MASTERS
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths
from shardwright.operators import record
from shardwright.program import Program

TORCHTITAN = "torchtitan"


@dataclass(frozen=True)
class Whole:
    """Bytes that a stage keeps from pass to pass: its ``gathered`` parameters, and its ``gradients`` beyond those in the
    dtype of the model."""

    gathered: int
    gradients: int


def keeps_whole(c: Configuration) -> bool:
    """Whether an engine keeps gathered parameters and whole float32 gradients from one pass of a pipeline to the next.

    >>> keeps_whole(Configuration("torchtitan", shard=8, pipeline=2, reshard=False))
    True
    """
    divided = (c.shard or 1) > 1 and c.sharding == PARAMETERS
    return c.engine == TORCHTITAN and c.pipeline > 1 and divided and not c.reshard


def kept_whole(program: Program) -> Whole:
    """What a stage then keeps."""
    kind, gathered, gradients = optimizer(program.optimizer), 0, 0
    for number in program.arrivals:
        instruction = program.instructions[number]
        rests = program.flow.values[program.flow.rest[instruction.name]].local
        read = gradient_bytes(program, number)
        gathered += read if read > rests.bytes else 0
        gradients += kind.kept(read, rests.dtype) - read
    return Whole(gathered, gradients)


def rests_in_float32(c: Configuration) -> bool:
    """Whether parameters rest in float32 alone, though they are computed with in half precision.

    >>> rests_in_float32(Configuration("torchtitan", shard=8, optimizer="adamw-float32"))
    True
    """
    divided = (c.shard or 1) > 1 and c.sharding == PARAMETERS
    return c.engine == TORCHTITAN and divided and c.optimizer == MASTERS


def in_half_precision(program: Program) -> int:
    """Bytes of the trained parameters as they are computed with, those beside which float32 ones rest."""
    kind = optimizer(program.optimizer)
    rests = (program.flow.values[program.flow.rest[name]].local for name in program.trained)
    return sum(local.bytes for local in rests if kind.beside(local.bytes, local.dtype))


def computes_again(graph: Graph, c: Configuration) -> frozenset[str]:
    """Paths of the modules whose products torchtitan's selective recomputation computes again.

    >>> sorted(computes_again(graph, Configuration("torchtitan", recompute="light")))              # doctest: +SKIP
    ['blocks.0.attention.key', 'blocks.0.attention.output', 'blocks.0.feed.up']
    """
    if c.engine != TORCHTITAN or c.recompute != LIGHT:
        return frozenset()
    products = [op.module for op in graph.ops if record(op.target).kind == "matmul"]
    inside = [[path for path in products if f"{path}.".startswith(f"{block}.")] for block in block_paths(graph)]
    return frozenset(path for paths in inside for path in paths[1::2])


def of_one_rank(c: Configuration) -> tuple[Configuration, int]:
    """What a device of context parallelism is asked about: rows of its own positions, parameters divided over all ranks
    that see others; and the number of ranks that share a sequence.

    >>> own, count = of_one_rank(Configuration("torchtitan", shard=2, context=4, batch=2, length=8192))
    >>> own.shard, own.context, own.batch, own.length, count
    (8, 1, 8, 2048, 4)
    """
    count = c.context or 1
    if count == 1:
        return c, 1
    ranks = "shard" if c.engine == TORCHTITAN or c.shard is None or c.shard > 1 else "replicate"
    degree = getattr(c, ranks)
    own: dict[str, Any] = {ranks: degree and degree * count, "batch": c.batch and c.batch * count}
    return replace(c, context=1, length=c.length and c.length // count, **own), count


def shorter_rows(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A batch of (rows, positions) as so many times the rows of so many times fewer positions; nothing where its tensors
    are not all of that shape.

    >>> [x.shape for x in shorter_rows((torch.empty(2, 8), torch.empty(2, 8, 3)), {}, 4)[0]]
    [torch.Size([8, 2]), torch.Size([8, 2, 3])]
    """
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    shapes = {tuple(x.shape[:2]) for x in given}
    if len(shapes) != 1 or any(x.ndim < 2 or x.shape[1] % count for x in given):
        return None

    def cut(x: Any) -> Any:
        return x.reshape(-1, x.shape[1] // count, *x.shape[2:]) if isinstance(x, torch.Tensor) else x

    return tuple(map(cut, args)), {name: cut(x) for name, x in kwargs.items()}


def met(graph: Graph, c: Configuration, ring: int) -> float:
    """Bytes of the keys and values of all ``ring`` ranks, of the largest attention of a micro-batch on one device; ``graph``
    and ``c`` are those of one rank (:func:`of_one_rank`)."""
    read = (op.inputs[1:3] for op in graph.ops if record(op.target).kind == "attention")
    own = max((sum(graph.tensors[name].bytes for name in names) for names in read), default=0)
    return ring * own / (c.data * (c.tensor or 1) * (c.microbatches or 1)) if ring > 1 else 0.0


def counted(c: Configuration, ring: int = 1) -> str:
    """What of an answer is as that engine does it, or is not, in a sentence; empty where there is nothing to say. ``ring``:
    so many ranks that share a sequence are counted as its engine's.

    >>> counted(Configuration("torchtitan", shard=8))
    ''
    """
    said = []
    if ring > 1:
        said.append(
            f"Context parallelism is counted as that engine does it: {ring} ranks share a sequence, and each has its own "
            "positions of everything, with the keys and values of all of one attention; our own plan also has their scores."
        )
    if keeps_whole(c):
        said.append(
            "Counted as torchtitan does it: gathered parameters and whole float32 gradients are kept between the passes of "
            "the pipeline; our own plan gathers again and takes less."
        )
    if (c.context or 1) > 1:
        said.append(
            "Context parallelism is counted as ours, which gathers keys and values and masks scores, for the batch is not "
            "of rows and positions alone: an engine that passes them around a ring takes less, of long sequences much less."
        )
    return " ".join(said)
