"""What one operator really does to memory, learned by asking autograd itself on tensors without data.

The operator is called on meta tensors of the rank's own shapes and strides while every storage that comes to life or dies
is noted and every tensor autograd saves is caught (``torch.autograd.graph.saved_tensors_hooks``). So the answer for any
operator, also one nobody described, is what PyTorch's derivative formulas keep, whether a reshape copies, and how much is
alive for a moment inside. Which kernels a device picks where it has a choice is said by
:mod:`~shardwright.operators.record`. Every distinct question is asked once and remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from shardwright.graph import Op, Value
from shardwright.graph.core import DTYPE_BYTES, Atom, Ref
from shardwright.operators.record import RESHAPE, record
from shardwright.program.storages import StorageWatch, address


@dataclass(frozen=True)
class Strided:
    """A tensor of one rank as memory sees it. ``grad``: autograd follows it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    grad: bool = False

    def __hash__(self) -> int:  # descriptions are keys everywhere, the same few of them: hash each once
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.strides, self.dtype, self.grad))

    @cached_property
    def without_gradient(self) -> Strided:
        """The same, not followed by autograd."""
        return Strided(self.shape, self.strides, self.dtype) if self.grad else self

    @cached_property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: str, grad: bool = False) -> Strided:
        return Strided(shape, contiguous_strides(shape), dtype, grad)


@dataclass(frozen=True)
class MadeTensor:
    """A tensor an operator gave. ``owner`` ≥ 0 numbers a fresh storage; ``owner`` < 0 is a view of argument ``-1-owner``."""

    tensor: Strided
    owner: int


@dataclass(frozen=True)
class ForwardFootprint:
    """The forward call: results (``None`` where an output is no tensor), sizes of the fresh storages that outlive it, which
    of them and which arguments autograd keeps, and the most that was alive inside beyond what it left behind. ``issued``
    counts what the host issues: kernels, views, and the functions and kernels of the backward pass (counted for pieces
    computed with several operators; otherwise each function is taken for one kernel)."""

    results: tuple[MadeTensor | None, ...]
    fresh: tuple[int, ...]
    saved_inputs: tuple[int, ...]
    saved_fresh: tuple[int, ...]
    temporary: int
    known: bool = True
    issued: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True)
class BackwardFootprint:
    """The backward call: one gradient per input (``None`` where there is none; a view's ``owner`` refers to the gradient
    of output ``-1-owner``), sizes of the fresh storages, and the most alive inside beyond them. ``early`` are the fresh
    storages of the forward call that were freed on the way, before most was alive."""

    gradients: tuple[MadeTensor | None, ...]
    fresh: tuple[int, ...]
    temporary: int
    early: tuple[int, ...] = ()


@dataclass(frozen=True)
class OperatorCall:
    """One operator with its arguments' places in place of names: equal calls have equal effects.

    ``slots`` gives for every tensor argument the number of the distinct tensor it is. ``piece`` tells apart the
    functions that run in place of the operator where a rank computes a special part of it.
    """

    target: str
    args: tuple[Value, ...]
    kwargs: tuple[tuple[str, Value], ...]
    slots: tuple[int, ...]
    piece: tuple[Any, ...] = ()

    def __hash__(self) -> int:  # as above
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.target, self.args, self.kwargs, self.slots, self.piece))

    @staticmethod
    def of(op: Op, slots: tuple[int, ...] | None = None, piece: tuple[Any, ...] = ()) -> OperatorCall:
        names = op.inputs
        chosen = tuple(names.index(name) for name in names) if slots is None else slots
        place = iter(range(len(names)))
        args = tuple(_placed(a, place) for a in op.args)
        kwargs = tuple((k, _placed(v, place)) for k, v in op.kwargs)
        return OperatorCall(op.target, args, kwargs, chosen, piece)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


_FORWARD: dict[Any, ForwardFootprint | None] = {}
"""``None``: it cannot run on meta tensors. What is taken for granted then is up to the question, not to the call alone."""
_BACKWARD: dict[Any, BackwardFootprint] = {}


def forward(
    call: OperatorCall,
    inputs: tuple[Strided, ...],
    device: str,
    kernel: Callable[..., Any] | None = None,
    expected: tuple[Strided | None, ...] = (),
) -> ForwardFootprint:
    """What the forward call of an operator leaves in memory on a device of this kind (``"cuda"`` or ``"cpu"``).

    An operator that cannot run on meta tensors is taken to keep everything: its inputs and its ``expected`` results.

    >>> x, w = Strided.contiguous((8, 16), "float32", True), Strided.contiguous((4, 16), "float32", True)
    >>> forward(OperatorCall("aten.linear.default", (Ref("0"), Ref("1")), (), (0, 1)), (x, w), "cuda").saved_inputs
    (0, 1)
    """
    key = (call, inputs, device)
    if key not in _FORWARD:
        try:
            _FORWARD[key] = _Session(call, inputs, device, kernel).forward()
        except Exception:  # whatever an operator raises without data, the answer is the cautious one
            _FORWARD[key] = None
    found = _FORWARD[key]
    return _cautious(inputs, expected) if found is None else found


def why_not(
    call: OperatorCall, inputs: tuple[Strided, ...], device: str, kernel: Callable[..., Any] | None = None
) -> str:
    """Why an operator cannot be run at all on tensors without data, in the first line of its own words; empty if it can."""
    try:
        with torch.no_grad():
            _Session(call, inputs, device, kernel)._run()
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def backward(
    call: OperatorCall,
    inputs: tuple[Strided, ...],
    gradients: tuple[Strided | None, ...],
    device: str,
    kernel: Callable[..., Any] | None = None,
) -> BackwardFootprint:
    """What the backward call leaves in memory, given the gradients that arrive (``None`` where there is none)."""
    key = (call, inputs, gradients, device)
    if key not in _BACKWARD:
        try:
            session = _Session(call, inputs, device, kernel)
            session.forward()
            _BACKWARD[key] = session.backward(gradients)
        except Exception:  # as above
            fresh = [i for i, tensor in enumerate(inputs) if tensor.grad]
            results = tuple(MadeTensor(t, fresh.index(i)) if t.grad else None for i, t in enumerate(inputs))
            _BACKWARD[key] = BackwardFootprint(results, tuple(inputs[i].bytes for i in fresh), 0)
    return _BACKWARD[key]


def _cautious(inputs: tuple[Strided, ...], expected: tuple[Strided | None, ...]) -> ForwardFootprint:
    made = [tensor for tensor in expected if tensor is not None]
    places = iter(range(len(made)))
    results = tuple(None if tensor is None else MadeTensor(tensor, next(places)) for tensor in expected)
    follows = any(tensor.grad for tensor in inputs)
    saved = tuple(range(len(inputs))) if follows else ()
    kept = tuple(range(len(made))) if follows else ()
    return ForwardFootprint(results, tuple(tensor.bytes for tensor in made), saved, kept, 0, known=False)


class _Session:
    """One operator on meta tensors, with its storages watched."""

    def __init__(
        self, call: OperatorCall, inputs: tuple[Strided, ...], device: str, kernel: Callable[..., Any] | None
    ) -> None:
        self.call, self.inputs, self.device, self.kernel = call, inputs, device, kernel
        self.known = record(call.target)
        distinct: dict[int, torch.Tensor] = {}
        for slot, tensor in zip(call.slots, inputs, strict=True):
            if slot not in distinct:
                distinct[slot] = _meta(tensor)
        self.leaves = [distinct[slot] for slot in call.slots]
        self.outputs: list[torch.Tensor | None] = []
        self.numbers: list[int] = []
        self.watch = StorageWatch()

    def forward(self) -> ForwardFootprint:
        held = {address(leaf): -1 - i for i, leaf in reversed(list(enumerate(self.leaves)))}
        saved: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(address(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), self.watch.watching(set(held)):
            made = self._run()
        self.outputs = [v if isinstance(v, torch.Tensor) else None for v in _listed(made)]
        for output in self.outputs:
            if output is not None:
                self.watch.see(output)
        place = {key: i for i, key in enumerate(self.watch.alive)}
        self.numbers = [number for number, _ in self.watch.alive.values()]
        fresh = tuple(size for _, size in self.watch.alive.values())
        results = tuple(
            None if o is None else MadeTensor(_described(o), {**held, **place}[address(o)]) for o in self.outputs
        )
        kept_inputs = sorted({-1 - held[key] for key in saved if key in held})
        kept_fresh = sorted({place[key] for key in saved if key in place})
        own = self._reserve([r and r.tensor for r in results])[0]
        temporary = own + self._inside(self.watch.peak - sum(fresh))
        kernels, views, functions = self.watch.kernels, self.watch.views, _functions(self.outputs)
        issued = (kernels, views, functions, functions if self.kernel is None else self._backward_kernels())
        return ForwardFootprint(results, fresh, tuple(kept_inputs), tuple(kept_fresh), temporary, issued=issued)

    def _backward_kernels(self) -> int:
        """How many kernels the backward pass would issue."""
        outputs = [output for output in self.outputs if output is not None and output.requires_grad]
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not outputs or not wanted:
            return 0
        watch = StorageWatch()
        gradients = [torch.empty_like(output) for output in outputs]
        with watch.watching(set()):
            torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)
        return watch.kernels

    def backward(self, gradients: tuple[Strided | None, ...]) -> BackwardFootprint:
        pairs = [
            (output, _meta(gradient), j)
            for j, (output, gradient) in enumerate(zip(self.outputs, gradients, strict=True))
            if output is not None and gradient is not None and output.requires_grad
        ]
        wanted = list({id(leaf): leaf for leaf in self.leaves if leaf.requires_grad}.values())
        if not pairs or not wanted:
            return BackwardFootprint((None,) * len(self.leaves), (), 0)
        held = {address(gradient): -1 - j for _, gradient, j in pairs}
        first = self.watch.count
        with self.watch.watching({*held, *map(address, self.leaves)}):
            found = torch.autograd.grad([o for o, _, _ in pairs], wanted, [g for _, g, _ in pairs], allow_unused=True)
        by_leaf = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True)}
        made = {key: size for key, (number, size) in self.watch.alive.items() if number >= first}
        place = {key: i for i, key in enumerate(made)}
        results: list[MadeTensor | None] = []
        for leaf in self.leaves:
            gradient = by_leaf.get(id(leaf))
            if gradient is None:
                results.append(None)
                continue
            key = address(gradient)
            if key not in place and key not in held:  # a view of something saved: it holds that alive, add nothing
                place[key], made[key] = len(place), 0
            results.append(MadeTensor(_described(gradient), {**held, **place}[key]))
        fresh = tuple(made[key] for key in place)
        at_peak = sum(size for number, size in self.watch.at_peak.items() if number >= first)
        early = tuple(i for i, number in enumerate(self.numbers) if number not in self.watch.at_peak)
        own = self._reserve(gradients)[1]
        return BackwardFootprint(tuple(results), fresh, own + self._inside(at_peak - sum(fresh)), early)

    def _reserve(self, outputs: Sequence[Any]) -> tuple[int, int]:
        return (0, 0) if self.known.reserve is None else self.known.reserve(self.device, self.inputs, outputs)

    def _inside(self, seen: int) -> int:
        """Bytes that come and go inside, from those that were seen to on meta tensors."""
        return 0 if self.kernel is not None and self.device in self.known.fused_on else max(0, seen)

    def _run(self) -> Any:
        if self.kernel is not None:
            with torch.device("meta"):
                return self.kernel(*self.leaves, exchange=_exchange)
        target = RESHAPE if self.known.reshapes else self.call.target
        function = self.known.on_device.get(self.device) or resolve(target)
        kwargs = {k: _value(v, self.leaves) for k, v in self.call.kwargs}
        if len(self.call.args) <= _device_argument(target):
            kwargs["device"] = torch.device("meta")
        return function(*(_value(a, self.leaves) for a in self.call.args), **kwargs)


def _exchange(tensor: torch.Tensor, reduce: str, loop: str) -> torch.Tensor:
    """Stands for the reduction of a statistic between ranks, which gives a new tensor of the same size."""
    return tensor.clone() if reduce == "sum" else tensor.detach().clone()


@lru_cache(maxsize=4096)
def _device_argument(target: str) -> int:
    """Place of the argument that says where the result is made; -1 where there is none."""
    schema = getattr(resolve(target), "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    return names.index("device") if "device" in names else -1


@lru_cache(maxsize=4096)
def resolve(target: str) -> Callable[..., Any]:
    """The function behind an operator's name: ``"aten.linear.default"`` → ``torch.ops.aten.linear.default``."""
    function: Any = torch.ops
    for part in target.split("."):
        function = getattr(function, part)
    return function


def _placed(value: Any, place: Iterator[int]) -> Any:
    if isinstance(value, Ref):
        return Ref(str(next(place)))
    return tuple(_placed(v, place) for v in value) if isinstance(value, tuple) else value


def _value(value: Any, leaves: list[torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return leaves[int(value.name)]
    if isinstance(value, tuple):
        return [_value(v, leaves) for v in value]
    if isinstance(value, Atom):
        if value.kind == "complex":
            return complex(value.value)
        return torch.device("meta") if value.kind == "device" else getattr(torch, value.value)
    return value


def _meta(tensor: Strided) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.strides, dtype=getattr(torch, tensor.dtype), device="meta")
    return made.requires_grad_(tensor.grad)


def _described(tensor: torch.Tensor) -> Strided:
    return Strided(
        tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
    )


def _functions(outputs: list[torch.Tensor | None]) -> int:
    """How many functions autograd would run backwards from these."""
    waiting = [output.grad_fn for output in outputs if output is not None and output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        for function, _ in waiting.pop().next_functions:
            if function is not None and function.next_functions and function not in seen:  # a leaf has none
                seen.add(function)
                waiting.append(function)
    return len(seen)


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (tuple, list)) else [made]
