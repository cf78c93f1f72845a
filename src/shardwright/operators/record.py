"""One record per operator: everything Shardwright knows about it stands here, and everybody asks :func:`record`.

A record says what an operator computes (from which every split of it is derived), how a rank computes a piece where that is
more than calling the operator on local inputs, and what the rest of the house wants to know: how random it is, what it keeps
on which device, what its loss or mean is a sum of. The families of PyTorch's operators stand in ``operators/families/``, one
file each, and are imported when somebody first asks; users add records with :func:`~shardwright.operators.describe`, which
have the same rights.

A record is filed under an operator's overload (``aten.sum.dim_IntList``) or under its name alone (``aten.sum``), for all its
overloads; where both exist, what the overload's says wins. An operator without a record is not an error anywhere: it is
probed, priced by the bytes it moves, and takes no part in what only a record could allow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from shardwright.graph import Op, Tensor

RESHAPE = "aten.reshape.default"
"""What is called on a rank for every operator that only reshapes: a shard may lie otherwise than the whole tensor did."""


@dataclass(frozen=True)
class Draws:
    """How an operator draws random numbers: ``when`` its arguments ask for some. A dropout (tensor, rate, training) can be
    drawn apart from what it is applied to, and there is one ``with_mask``, which also returns what it kept; others draw in
    the middle of what they compute."""

    when: Callable[[Op], bool]
    with_mask: str = ""

    @property
    def dropout(self) -> bool:
        return self.with_mask != ""


@dataclass(frozen=True)
class HostClass:
    """How the host issues an operator: ``like`` which timed one (by default, the one its kernels are measured under), or
    ``flat`` where no operand has more than two dims. The timed backward pass had one kernel for each of so many
    ``gradients`` (0: one for all of them); where it ``sums``, what was broadcast is summed up. ``turned``: its operands are
    turned by views first; ``steps``: one call, inside of which so many are issued."""

    like: str = ""
    flat: str = ""
    gradients: int = 0
    sums: bool = False
    turned: bool = False
    steps: Callable[[Op, Sequence[Tensor]], int] | None = None


@dataclass(frozen=True, eq=False)
class OperatorRecord:
    """What is known about one operator; every field has a default that holds for an operator nobody knows."""

    function: Callable[..., Any] | None = None
    """Its description: from the arguments to one lambda per result (:mod:`~shardwright.operators.language`)."""
    kind: str = "other"
    flops: Callable[..., float] | None = None
    piece: Callable[..., Any] | None = None
    """From a :class:`~shardwright.operators.pieces.Call` to what one rank runs, or ``None`` for the operator itself."""
    whole: str = ""
    """Why it cannot be split."""
    reshapes: bool = False
    """It keeps all elements in their order."""
    fill: int | None = None
    """Of an operator that pads: which argument says with what."""
    loss: str = ""
    """Of a loss: what it compares its input with, ``"classes"`` or ``"pairs"`` of elements."""
    as_sum: str = ""
    """Of a mean: the operator that adds up the same elements."""
    batch_statistics: bool = False
    """It normalises by statistics of the batch."""
    only_updates: bool = False
    """It updates running statistics that its results do not depend on."""
    channels_last: bool = False
    """Fast kernels on CUDA want its input with the channels last."""
    orders_operands: bool = False
    """It copies operands that are no batch of matrices as they lie."""
    kernels: Callable[..., Any] | None = None
    """From a :class:`~shardwright.operators.work.LocalOp` to the kernels of its passes; by default it is bound by memory."""
    view_gradient: Callable[..., Any] | None = None
    """Of a view whose gradient is none: the kernels of its backward pass."""
    hands_on: Callable[[Op, Sequence[Tensor], Tensor | None], bool] | None = None
    """Whether a call of it, with these inputs and this result, hands its input on."""
    measured: str = ""
    """The name that calibration measures its kernels under; by default its own."""
    issued: HostClass = HostClass()
    draws: Draws | None = None
    """Random numbers; without it, those of the kind ``random`` draw."""
    on_device: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """By the kind of device: what is called there, on tensors without data, in place of the operator."""
    reserve: Callable[[str, Sequence[Any], Sequence[Any]], tuple[int, int]] | None = None
    """Bytes its kernel allocates for itself, forward and backward: of the kind of device, the inputs and the outputs."""
    fused_on: frozenset[str] = frozenset()
    """Kinds of devices on which a piece that is written out is a few kernels, which need no temporaries."""
    recordable: bool = True
    """Whether it may stand in a CUDA graph; where the host waits for what it computed it is performed between two."""
    only_measures: bool = False
    """It makes something as large as its argument, and reads no number of it."""
    any_strides: bool = False
    """Its kernel computes the same however its arguments lie in memory; pointwise operators say so themselves."""
    alias: bool = False
    """Its result is its input as it is."""
    early: bool = False
    """It reads little or nothing of what its piece reads and can be done before its turn."""
    always_writes: frozenset[int] = frozenset()
    """Of an operator that takes a mask of the gradients that are wanted: those that it writes in any case."""
    updates_lists: bool = False
    """It updates lists of tensors element by element: an optimizer's fused step."""
    python: Mapping[str, str] = field(default_factory=dict)
    """Functions by which Python calls for its random numbers, and how: ``"created"``, ``"filled"`` in place, ``"chosen"``,
    elements (or whole ``"features"``) ``"dropped"``, inside of ``"attention"``."""
    decides: str = ""
    """Its gradient jumps: where its argument crosses ``"zero"``, or with which are the largest in ``"windows"`` or
    ``"chosen"`` along a dim."""
    in_files: bool = False
    """Of our own: it does nothing but compute, so that the graph inside a plan's file may call it."""
    performs: Callable[[Op], Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]]] | None = None
    """Of an operator that stands for several: their names and arguments."""
    module: str = ""
    """The class of ``torch.nn`` that holds its weight, where PyTorch has styles to cut that class by features."""
    samples: Callable[..., Sequence[tuple[Any, ...]]] | None = None
    """Calls to check it on, from as many sizes as the function takes (:mod:`~shardwright.operators.samples`)."""


NOTHING = OperatorRecord()
_RECORDS: dict[str, OperatorRecord] = {}


def records() -> MutableMapping[str, OperatorRecord]:
    """Every record by the name it is filed under."""
    from shardwright.operators import families  # noqa: F401 - registers them

    return _RECORDS


def record(target: str) -> OperatorRecord:
    """What is known about an operator: about its overload, and beyond that about all its overloads.

    >>> record("aten.dropout.default").draws.dropout, record("mylib.unheard.of") is NOTHING
    (True, True)
    """
    known = records()
    own, general = known.get(target), known.get(target.rpartition(".")[0])
    if own is None or general is None:
        return own or general or NOTHING
    return _merged(own, general)


@cache
def _merged(own: OperatorRecord, general: OperatorRecord) -> OperatorRecord:
    said = {f.name: value for f in fields(own) if (value := getattr(own, f.name)) != getattr(NOTHING, f.name)}
    return replace(general, **said)


def known(*targets: str, **facts: Any) -> None:
    """File what is known about operators: ``known("aten.view", reshapes=True)``; what was filed before stays."""
    for target in targets:
        _RECORDS[target] = replace(_RECORDS.get(target, NOTHING), **facts)


def describes(*targets: str, **facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """File what operators compute: ``@describes("aten.bmm.default", kind="matmul")``, with whatever else is known.

    The function receives the operator's arguments in the order of its schema, tensors as
    :class:`~shardwright.operators.language.TensorArgument`, and returns one lambda per output. Keyword-only parameters are
    filled by name from the schema; ``out`` is the tuple of output shapes.
    """
    from shardwright.operators.validating import validate

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        validate(targets[0], function)
        known(*targets, function=function, **facts)
        return function

    return register


def computes(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """File how a piece of an operator is run: a function from :class:`~.pieces.Call` to a piece, or ``None``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        known(*targets, piece=function)
        return function

    return register


def measured_name(target: str) -> str:
    """The name that calibration measures an operator's kernels under.

    >>> measured_name("aten.stack.default"), measured_name("aten.relu.default"), measured_name("mylib.relu.default")
    ('cat', 'relu', 'mylib.relu')
    """
    return record(target).measured or target.rpartition(".")[0].removeprefix("aten.") or target


def draws(op: Op, kind: str) -> bool:
    """Whether an operator of this kind draws random numbers as it stands."""
    how = record(op.target).draws
    return kind == "random" if how is None else how.when(op)
