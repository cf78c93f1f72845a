"""Control flow that looks at data: resolved on the example, recorded as an assumption, checked whenever the graph runs.

``if mask.any():`` takes one way for one batch and another for the next; a graph holds one way. Where export stops at such a
question, the model is run once on the example and its answers are kept (:func:`answers_of`). The model is then exported
again with these answers (:func:`assuming`), and each leaves an operator in the graph, ``shardwright.assumed``, which returns
its argument and raises :class:`AssumptionBroken` where the data says otherwise. No rule cuts it: every rank asks about the
whole tensor, so that all of them go on or stop together. How many rows a mask selects is asked so too, but only where the
model cannot be captured without: most compute with as many as there are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright._torch_compat import fake_tolist, has_data, keep_without_readers, taken_for_granted
from shardwright.errors import AssumptionBroken, CaptureError
from shardwright.frontend.checks import answer_of_check
from shardwright.frontend.provenance import asking_line
from shardwright.frontend.scalars import numbers_for

NAME = "shardwright::assumed"
_QUESTIONS = {
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.is_nonzero,
    torch.is_nonzero,
}
_ROWS = {torch.Tensor.unbind, torch.unbind}
"""``for row in x.nonzero():`` takes a tensor apart, and so asks how many rows it has."""
_SELECTING = {
    "nonzero",
    "argwhere",
    "where",
    "masked_select",
    "unique",
    "unique_consecutive",
    "repeat_interleave",
    "__getitem__",
}
"""Names of functions, of torch and of tensors, whose results may have extents that only the data knows."""
_COMPARISONS = {torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose}


@dataclass
class Answers:
    """What a model read from its data, by the line that asked, in the order of asking: by which function, and the answer."""

    by_line: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))
    shapes: bool = False
    """Whether what is selected by data is as much as in the example, too."""


class _Listening(TorchFunctionMode):
    """Writes down every answer. A number with a fraction stays a tensor, as it does while the model is exported: what is
    asked of it then (``if loss.item() > 1.0``) is asked of tensors both times."""

    def __init__(self) -> None:
        self.answers = Answers()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = numbers_for(function, args, kwargs or {}, self._heard)
        result = function(*args, **kwargs)
        if function in _ROWS:
            self.answers.by_line[asking_line()].append((function, len(result)))
        if _selects(function, args):
            self.answers.by_line[asking_line()].append((_selects, [list(x.shape) for x in _tensors(result)]))
        if function in _QUESTIONS or function in _COMPARISONS:
            self.answers.by_line[asking_line()].append((function, result))
        return _scalar(args[0]) if function is torch.Tensor.item and isinstance(result, float) else result

    def _heard(self, size: Tensor) -> int:
        self.answers.by_line[asking_line()].append((torch.Tensor.item, int(size)))  # as an export asks too
        return int(size)


class _Assuming(TorchFunctionMode):
    """Gives the answers of another run, and leaves an operator for each that checks it."""

    def __init__(self, answers: Answers) -> None:
        self.left = {line: list(found) for line, found in answers.by_line.items()}
        self.shapes = answers.shapes

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _QUESTIONS and function not in _COMPARISONS:
            args, kwargs = numbers_for(function, args, kwargs or {}, self._size)
            if function in _ROWS:
                args = (self._counted(function, *args, **kwargs), *args[1:])
            result = function(*args, **kwargs)
            return self._selected(result) if self.shapes and _selects(function, args) else result
        return self.answer(function, lambda: function(*args, **(kwargs or {})), *args, **(kwargs or {}))

    def _size(self, size: Tensor) -> int:
        found: int = self.answer(torch.Tensor.item, lambda: int(size), size)
        return found

    def _counted(self, function: Any, x: Tensor, dim: int = 0) -> Tensor:
        """``x`` with as many rows as the example had, where only the data says how many."""
        line = asking_line()
        count = self._next(function, line)
        if isinstance(x.shape[dim], int) or count is None or dim != 0:
            return x
        return _sized(x, 0, count, line)

    def _selected(self, result: Any) -> Any:
        """What was selected, with the extents that the example had."""
        line = asking_line()
        shapes = iter(self._next(_selects, line) or ())

        def fixed(x: Any) -> Any:
            if isinstance(x, Tensor):
                for dim, extent in enumerate(next(shapes, ())):
                    if not isinstance(x.shape[dim], int):
                        x = _sized(x, dim, extent, line)
            return x

        return type(result)(map(fixed, result)) if isinstance(result, tuple | list) else fixed(result)

    def _next(self, function: Any, line: str) -> Any:
        """The next answer to such a question on this line; what was asked in between only of numbers is passed over."""
        left = self.left.get(line, [])
        place = next((i for i, (asked, _) in enumerate(left) if asked is function), None)
        if place is None:
            return None
        answer = left[place][1]
        del left[: place + 1]
        return answer

    def answer(self, function: Any, otherwise: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """The answer of the other run to this question, or ``otherwise`` where it has none or none is needed."""
        line = asking_line()
        answer = self._next(function, line)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if answer is None or all(has_data(tensor) for tensor in tensors):
            return otherwise()
        if function is torch.Tensor.__bool__ and (check := answer_of_check()) is not None:
            return check
        if function in _COMPARISONS:
            asked = _compared(function, *args, **kwargs)
        elif _has_floats(answer):
            if function is torch.Tensor.item:
                return _scalar(tensors[0])
            if line.startswith("torch/"):
                return otherwise()  # one of PyTorch's modules, which the refusal will name
            raise CaptureError(
                f"The model reads the number {answer} from data at {line} to compute with it outside of tensors.",
                "Keep it a tensor (no float(), no math functions; item() may be compared), or pass it in as an argument.",
            )
        else:
            asked = tensors[0] if isinstance(answer, list) else tensors[0].reshape(())  # item() takes a single one out
        torch.ops.shardwright.assumed(asked, json.dumps(answer), line)
        return answer


def _selects(function: Any, args: Any) -> bool:
    """Whether a function is called so that its result's extents depend on data."""
    name = getattr(function, "__name__", "")
    if name == "__getitem__":
        return any(x.dtype in (torch.bool, torch.uint8) and x.dim() > 0 for x in _tensors(args[1]))
    return name in _SELECTING and (name != "where" or len(args) == 1)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, Tensor)]


def _sized(x: Tensor, dim: int, count: int, line: str) -> Tensor:
    """``x`` with the extent ``count`` along a dim, where only the data says how many there are."""
    column = x.movedim(dim, 0)
    while column.dim() > 1:
        column = column.select(-1, 0)
    torch.ops.shardwright.assumed(torch.ones_like(column, dtype=torch.long).sum(), json.dumps(count), line)
    taken_for_granted(x.shape[dim] == count)
    shape = list(x.shape)
    shape[dim] = count
    # With rows to spare, so that another batch reaches the check.
    return torch.cat([x, x.new_zeros(shape)], dim).narrow(dim, 0, count)


def _scalar(x: Tensor) -> Tensor:
    """What stands for ``x.item()``: a tensor without dims goes wherever a number goes."""
    return x.detach().reshape(())


def _compared(function: Any, one: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if one.shape != other.shape and function in (torch.equal, torch.Tensor.equal):
        return torch.zeros((), dtype=torch.bool)
    same = one == other if function in (torch.equal, torch.Tensor.equal) else torch.isclose(one, other, *args, **kwargs)
    return same.all()


def _has_floats(answer: Any) -> bool:
    return any(_has_floats(item) for item in answer) if isinstance(answer, list) else isinstance(answer, float)


def answers_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answers:
    """Run ``model`` once as it is and listen; buffers and random numbers are put back."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[]), _Listening() as listening:
        model(*args, **kwargs)
    for name, buffer in model.named_buffers():
        buffer.data.copy_(before[name])
    return listening.answers


@contextmanager
def assuming(answers: Answers | None) -> Iterator[None]:
    """While a model is exported, answer its questions about data; without answers nothing happens."""
    if answers is None:
        yield
        return
    mode = _Assuming(answers)
    # A fake tensor's own tolist() would ask for every number by itself.
    with mode, fake_tolist(lambda original, x: mode.answer(torch.Tensor.tolist, lambda: original(x), x)):
        yield


@torch.library.custom_op(NAME, mutates_args=())
def _operator(value: Tensor, expected: str, line: str) -> Tensor:
    found, wanted = value.tolist(), json.loads(expected)
    if found != wanted:
        raise AssumptionBroken(
            f"At {line} the model looks at its data: the graph was captured for {_short(wanted)}, this batch gives "
            f"{_short(found)}.",
            "Capture and plan with an example like this batch, or decide with torch.where instead of Python.",
        )
    return value.clone()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@_operator.register_fake
def _(value: Tensor, expected: str, line: str) -> Tensor:
    return torch.empty_like(value)


_operator.register_autograd(lambda ctx, grad: (None, None, None), setup_context=lambda ctx, inputs, output: None)
keep_without_readers(torch.ops.shardwright.assumed.default)
