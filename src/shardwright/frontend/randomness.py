"""Random numbers that decide control flow while a model is traced.

Most encoder-decoders of Hugging Face skip layers at random: ``if torch.rand([]) < self.layerdrop``. At the usual rate
of zero the test can never be true, yet reading it stops an export. Inside :func:`inert_randomness` such a number
answers comparisons whose outcome does not depend on it (with a rate of at most 0 or at least 1); any other becomes a
refusal when it is used as a condition. Numbers drawn outside PyTorch (``random``, ``numpy.random``) would be frozen
into the graph, and are refused too.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.errors import CaptureError
from shardwright.process_wide import replaced


@contextmanager
def inert_randomness() -> Iterator[None]:
    """Let comparisons of a random number with a rate of 0 or 1 pass, and refuse what a graph cannot hold."""

    def rand(real: Any) -> Any:
        def drawn(*size: Any, **options: Any) -> Any:
            return (
                _RandomNumber(lambda: real(*size, **options)) if _is_scalar(size, options) else real(*size, **options)
            )

        return drawn

    def uniform(real: Any) -> Any:
        def drawn(low: float, high: float) -> Any:
            return _RandomNumber(lambda: real(low, high)) if (low, high) == (0, 1) else real(low, high)

        return drawn

    before = _foreign_states()
    with (
        replaced(torch, "rand", rand),
        replaced(random, "uniform", uniform),
        replaced(random, "random", lambda real: lambda: _RandomNumber(real)),
    ):
        yield
    for name, state in _foreign_states().items():
        if name in before and state != before[name]:
            raise CaptureError(
                f"The model draws numbers from `{name}` in its forward, and one draw would be frozen into the graph.",
                "Draw them with torch (torch.rand, torch.bernoulli), pass them in, or switch that part off while training.",
            )


def _is_scalar(size: tuple[Any, ...], options: dict[str, Any]) -> bool:
    shape = size[0] if size and isinstance(size[0], tuple | list | torch.Size) else size
    return len(shape) == 0 and not options.get("requires_grad") and "out" not in options


def _foreign_states() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


class _RandomNumber:
    """A number between 0 and 1 that is drawn only when its value is needed."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw
        self._drawn: Any = None

    def _value(self) -> Any:
        if self._drawn is None:
            self._drawn = self._draw()
        return self._drawn

    def _compare(self, rate: Any, compare: Callable[[Any, Any], Any], below: bool) -> Any:
        """The outcome where it is certain, else a condition that refuses to be one."""
        if isinstance(rate, int | float):
            if rate <= 0:
                return not below
            if rate >= 1:
                return below
        return _RandomCondition(lambda: compare(self._value(), rate), rate)

    def __lt__(self, rate: Any) -> Any:
        return self._compare(rate, operator.lt, below=True)

    def __le__(self, rate: Any) -> Any:
        return self._compare(rate, operator.le, below=True)

    def __gt__(self, rate: Any) -> Any:
        return self._compare(rate, operator.gt, below=False)

    def __ge__(self, rate: Any) -> Any:
        return self._compare(rate, operator.ge, below=False)

    def __bool__(self) -> bool:
        return bool(self._value())

    def __float__(self) -> float:
        return float(self._value())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value(), name)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As an argument of a torch function it is what it stands for."""
        return function(*_opened(args), **_opened(kwargs or {}))


class _RandomCondition(_RandomNumber):
    """The outcome of comparing a random number with a rate between 0 and 1."""

    def __init__(self, draw: Callable[[], Any], rate: Any) -> None:
        super().__init__(draw)
        self._rate = rate

    def __bool__(self) -> bool:
        raise CaptureError(
            f"The model decides at random, at a rate of {self._rate}, which of its layers run.",
            "A plan covers one fixed graph: set that rate (often `layerdrop`) to 0.",
        )


def _opened(value: Any) -> Any:
    if isinstance(value, _RandomNumber):
        return value._value()
    if isinstance(value, tuple | list):
        return type(value)(_opened(item) for item in value)
    if isinstance(value, dict):
        return {key: _opened(item) for key, item in value.items()}
    return value


def _forward_to_value(name: str) -> Callable[..., Any]:
    def method(self: _RandomNumber, *args: Any) -> Any:
        return getattr(self._value(), name)(*_opened(args))

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow", "invert", "and", "or"):
    setattr(_RandomNumber, f"__{_name}__", _forward_to_value(f"__{_name}__"))
