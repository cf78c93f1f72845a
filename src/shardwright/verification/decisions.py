"""Where a model decides: the arguments of its ReLUs, maxima and choices, recorded, and moved across their jumps.

A ReLU asks whether a number is above zero, a max pool or a top-k which of two numbers is the larger. Rounding may answer
otherwise than exact arithmetic does, and then gradients differ by a jump. The same eager model run twice asks the same
questions in the same order, so two precisions can be laid side by side (:func:`jumps`): an answer is open where the gap
between the two numbers is within float32's error in that very tensor. :class:`Decisions` also moves a number across its
gap before the operator sees it, and so computes exactly what lies on the other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.operators.record import record

_BEYOND = 1e-6
"""How far beyond the jump a moved number lands, in units of float32's error there."""


class Question(NamedTuple):
    """One call of a deciding operator: its argument and its options."""

    decides: str
    """What about, as the operator's record says."""
    argument: Tensor
    options: tuple[tuple[Any, ...], dict[str, Any]]


class Jump(NamedTuple):
    """An open answer: ``element`` of the argument of a call must become ``value`` to be answered otherwise.

    ``gap`` is the distance in units of float32's error there; ``crossed`` says that the other run did answer otherwise.
    """

    call: int
    element: int
    value: float
    gap: float
    crossed: bool


class Decisions(TorchFunctionMode):
    """Inside, every question is recorded in ``questions``, after the numbers named by ``moves`` were moved."""

    def __init__(self, moves: Iterable[Jump] = ()) -> None:
        super().__init__()
        self.questions: list[Question] = []
        self._moves: dict[int, list[Jump]] = {}
        for move in moves:
            self._moves.setdefault(move.call, []).append(move)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        operator = name.rstrip("_")
        decides = record(f"aten.{operator}.default").decides
        if decides and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            moves = self._moves.get(len(self.questions), ())
            self.questions.append(Question(decides, args[0].detach().clone(), (args[1:], kwargs)))
            if moves:
                args = (_moved(args[0], moves, kwargs.get("inplace", name != operator)), *args[1:])
        return function(*args, **kwargs)


def _moved(argument: Tensor, moves: Sequence[Jump], inplace: bool) -> Tensor:
    """The argument with some elements elsewhere; its gradient passes as if they were where they came from."""
    elements = torch.tensor([move.element for move in moves])
    values = torch.tensor([move.value for move in moves], dtype=argument.dtype)
    shift = argument.new_zeros(argument.numel())
    shift[elements] = values - argument.detach().reshape(-1)[elements]
    return argument.add_(shift.view(argument.shape)) if inplace else argument + shift.view(argument.shape)


def jumps(exact: Sequence[Question], rounded: Sequence[Question], reach: float) -> list[Jump]:
    """The answers that rounding leaves open: gaps of at most ``reach`` times the error of ``rounded``, nearest first."""
    found: list[Jump] = []
    if [question.decides for question in exact] != [question.decides for question in rounded]:
        return found
    for call, (true, other) in enumerate(zip(exact, rounded, strict=True)):
        numbers, theirs = true.argument.reshape(-1), other.argument.reshape(-1).to(true.argument.dtype)
        error = float((numbers - theirs).abs().max()) if numbers.shape == theirs.shape and len(numbers) else 0.0
        pairs = _compared(true) if 0.0 < error < float("inf") else None
        if pairs is None:
            continue
        elements, rivals = pairs
        gaps, their_gaps = numbers[elements], theirs[elements]
        if rivals is not None:  # equal numbers are equal by construction (zeros behind a ReLU), not by chance
            gaps, their_gaps = gaps - numbers[rivals], their_gaps - theirs[rivals]
            near = (gaps.abs() <= 2 * reach * error) & (gaps != 0)
        else:
            near = gaps.abs() <= reach * error
        for index in near.nonzero().flatten().tolist():
            gap, element = float(gaps[index]), int(elements[index])
            above = gap > 0
            value = float(numbers[element]) - gap + _BEYOND * error * (-1 if above else 1)
            found.append(Jump(call, element, value, abs(gap) / error, above != bool(their_gaps[index] > 0)))
    return sorted(found, key=lambda jump: jump.gap)


def _compared(question: Question) -> tuple[Tensor, Tensor | None] | None:
    """The elements a question compares with zero (no rivals), or the runners-up and the winners they stand behind."""
    positions = torch.arange(question.argument.numel()).view(question.argument.shape)
    if question.decides == "zero":
        return positions.flatten(), None
    args, kwargs = question.options
    if question.decides == "chosen":
        return _last_chosen(question.argument, positions, *args, **kwargs)
    return _in_windows(question.argument, positions, *args, **kwargs)


def _last_chosen(
    x: Tensor, positions: Tensor, k: int, dim: int = -1, largest: bool = True, **_: Any
) -> tuple[Tensor, Tensor] | None:
    if x.dim() == 0 or x.shape[dim] <= k or k < 1:
        return None
    order = (x if largest else -x).topk(k + 1, dim=dim).indices
    last, next_best = (positions.gather(dim, order.narrow(dim, at, 1)).flatten() for at in (k - 1, k))
    return next_best, last


def _in_windows(
    x: Tensor,
    positions: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, Tensor] | None:
    if x.dim() != 4 or ceil_mode:
        return None
    kernel, pads = _pair(kernel_size), _pair(padding)

    def windows(image: Tensor, outside: float) -> Tensor:
        padded = torch.nn.functional.pad(image.double(), (pads[1], pads[1], pads[0], pads[0]), value=outside)
        columns = torch.nn.functional.unfold(padded, kernel, _pair(dilation), 0, _pair(stride or kernel))
        return columns.view(len(x), x.shape[1], kernel[0] * kernel[1], -1)

    values = windows(x, float("-inf"))
    if values.shape[2] < 2:
        return None
    best = values.topk(2, dim=2)
    places = windows(positions, 0.0).gather(2, best.indices).long()
    real = torch.isfinite(best.values).all(dim=2)
    return places[:, :, 1][real], places[:, :, 0][real]


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (tuple(size) * 2)[:2]
