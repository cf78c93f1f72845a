"""What another engine holds otherwise than the plan that follows its file: facts of that engine, no constants.

torchtitan with pipelines, from torch's ``PipelineStage`` (``torch/distributed/pipelining/stage.py``) and FSDP2
(``torch/distributed/fsdp/_fully_shard``): before every pass back but the last it calls ``set_reshard_after_backward(False)``
and ``set_requires_gradient_sync(False)``, and torchtitan's ``fsdp_reshard_after_forward`` "default" is "never" where there
are pipelines. So parameters that were gathered once stay whole until the last pass back, and gradients are added up whole;
FSDP2 keeps these sums in ``reduce_dtype`` (``to_accumulated_grad_if_needed``), which torchtitan sets to float32. Our own
plan gathers for every pass, and adds up in the dtype of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.costs.optimizer import optimizer
from shardwright.costs.passes import gradient_bytes
from shardwright.exchange.configuration import PARAMETERS, Configuration
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


def counted(c: Configuration) -> str:
    """What of an answer is as that engine does it, or is not, in a sentence; empty where there is nothing to say.

    >>> counted(Configuration("torchtitan", shard=8))
    ''
    """
    said = []
    if keeps_whole(c):
        said.append(
            "Counted as torchtitan does it: gathered parameters and whole float32 gradients are kept between the passes of "
            "the pipeline; our own plan gathers again and takes less."
        )
    if (c.context or 1) > 1:
        said.append(
            "Context parallelism is counted as ours, which gathers keys and values and masks scores: an engine that passes "
            "them around a ring takes less, of long sequences several times less."
        )
    return " ".join(said)
