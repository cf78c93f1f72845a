"""The recipes people use by hand, each stated as a restriction of the same space and solved, priced and run alike.

Data parallelism (batch loops only, parameters whole), ZeRO-3/FSDP (Rajbhandari et al., 2020: the same, parameters
sharded at rest), ZeRO-2 (gathered parameters stay until backward), ZeRO-1 (gradients stay whole too), Megatron tensor
parallelism (Shoeybi et al., 2019: on the fastest axis features only, weights never gathered; the other axes are data
parallel), its sequence-parallel form (Korthikanti et al., 2022), and one weird trick (Krizhevsky, 2014: convolutions by
batch, fully connected layers by features). Where a recipe says that operators are cut, they are, whether it pays or not.
Stated this way a baseline applies to any model, and what it gets is the best strategy of its kind.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import ShardwrightError
from shardwright.graph import Op, Tensor
from shardwright.operators import record
from shardwright.operators.rules import Layout, LoopRule
from shardwright.search.options import Restriction

BASELINES: dict[str, Callable[[int], Restriction]] = {}
"""By name, each for a number of axes; in this order they are tried and listed."""


def _recipe(name: str) -> Callable[[Callable[[int], Restriction]], Callable[[int], Restriction]]:
    """A function from a number of axes to a restriction, under the name that ``--search`` takes."""

    def register(function: Callable[[int], Restriction]) -> Callable[[int], Restriction]:
        BASELINES[name] = function
        return function

    return register


_PRODUCTS = ("matmul", "attention")
"""Kinds of operators that Megatron cuts by features."""


def _batch_only(op: Op, loop: LoopRule, label: str, axis: int) -> bool:
    return label == "batch" or not loop.divides


def _whole(tensor: Tensor, layout: Layout) -> bool:
    return all(isinstance(p, Replicate) for p in layout)


def _sharded(tensor: Tensor, layout: Layout) -> bool:
    return all(isinstance(p, Shard) for p in layout)


def _every(op: Op, axis: int) -> bool:
    return True


@_recipe("data-parallel")
def data_parallel(axes: int) -> Restriction:
    """Every operator cuts the batch; every rank holds all parameters."""
    return Restriction("data-parallel", _batch_only, _whole, cut=_every)


@_recipe("fsdp")
def fsdp(axes: int) -> Restriction:
    """Every operator cuts the batch; parameters, gradients and optimizer state rest in equal shards (ZeRO-3)."""
    return Restriction("fsdp", _batch_only, _sharded, cut=_every, together=True)


@_recipe("megatron")
def megatron(axes: int) -> Restriction:
    """Features on the last axis, batch on the others; no parameter is gathered on the last axis.

    Products are cut on all axes; what lies between them may be computed by every rank of the last axis alike.
    """
    tensor_axis = axes - 1

    def loop(op: Op, rule: LoopRule, label: str, axis: int) -> bool:
        return label == "" if axis == tensor_axis else _batch_only(op, rule, label, axis)

    def rest(tensor: Tensor, layout: Layout) -> bool:
        return all(isinstance(p, Replicate) for p in layout[:tensor_axis])

    def cut(op: Op, axis: int) -> bool:
        return axis != tensor_axis or record(op.target).kind in _PRODUCTS

    return Restriction("megatron", loop, rest, gather=lambda axis: axis != tensor_axis, cut=cut)


@_recipe("megatron-sp")
def megatron_sequence(axes: int) -> Restriction:
    """Megatron, with the operators between the products cut along the sequence."""
    plain = megatron(axes)

    def loop(op: Op, rule: LoopRule, label: str, axis: int) -> bool:
        between = axis == axes - 1 and label == "sequence" and record(op.target).kind not in _PRODUCTS
        return between or plain.loop(op, rule, label, axis)

    return Restriction("megatron-sp", loop, plain.rest, gather=plain.gather, cut=_every)


@_recipe("one-weird-trick")
def one_weird_trick(axes: int) -> Restriction:
    """Fully connected layers by features, everything else by batch."""

    def loop(op: Op, rule: LoopRule, label: str, axis: int) -> bool:
        connected = record(op.target).kind in _PRODUCTS
        return label == "" if connected else _batch_only(op, rule, label, axis)

    return Restriction("one-weird-trick", loop, gather=lambda axis: False, cut=_every)


@_recipe("mesh-tensorflow")
def mesh_tensorflow(axes: int) -> Restriction:
    """Batch over all axes but the last, features over the last, one meaning per axis (Shazeer et al., 2018)."""
    plain = megatron(axes)
    return Restriction("mesh-tensorflow", plain.loop, plain.rest, gather=lambda axis: False, cut=plain.cut)


@_recipe("zero-1")
def zero_1(axes: int) -> Restriction:
    """ZeRO-2 whose gradients stay whole until the backward pass is over and are then scattered, all at once (ZeRO-1)."""
    return Restriction("zero-1", _batch_only, _sharded, regather=False, whole_gradients=True, cut=_every, together=True)


@_recipe("zero-2")
def zero_2(axes: int) -> Restriction:
    """FSDP whose gathered parameters stay until backward: half the gathers, more memory (ZeRO-2)."""
    return Restriction("zero-2", _batch_only, _sharded, regather=False, cut=_every, together=True)


@_recipe("all-row-greedy")
def all_row(axes: int) -> Restriction:
    """Every operator cuts the first dim of its result, every parameter its own first dim (Tofu's all-row-greedy)."""

    first, summed = Shard(0), Partial("sum")

    def loop(op: Op, rule: LoopRule, label: str, axis: int) -> bool:
        return rule.outputs[0] == first or rule.outputs[0] == summed

    return Restriction("all-row-greedy", loop, rest=lambda t, layout: all(p == first for p in layout))


@_recipe("equal-chop")
def equal_chop(axes: int) -> Restriction:
    """Every operator cuts one loop with all axes, every parameter one dim (Tofu's equal-chop)."""
    return Restriction(
        "equal-chop",
        rest=lambda tensor, layout: len(set(layout)) == 1,
        split=lambda op, rules, chosen: len(set(chosen)) == 1,
    )


@_recipe("no-reductions")
def no_reductions(axes: int) -> Restriction:
    """Only loops whose pieces are concatenated, none whose pieces are summed (Jia et al., ICML 2018)."""
    return Restriction(
        "no-reductions", loop=lambda op, rule, label, axis: not any(isinstance(out, Partial) for out in rule.outputs)
    )


TWINS = ("mesh-tensorflow",)
"""Those whose strategies are all another's: with nothing at rest to gather, Mesh-TensorFlow's are Megatron's."""


ALIASES = {"zero1": "zero-1", "zero2": "zero-2", "zero3": "fsdp", "zero-3": "fsdp", "ddp": "data-parallel"}
"""Other names under which people know them."""


def restriction(name: str, axes: int) -> Restriction:
    """The restriction behind a baseline's name, on a mesh of ``axes`` axes."""
    name = ALIASES.get(name, name)
    if name not in BASELINES:
        raise ShardwrightError(f"There is no strategy {name!r}.", f"Known: {', '.join(BASELINES)}.")
    return BASELINES[name](axes)
