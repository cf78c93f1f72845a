"""Double precision throughout, for verification without rounding.

Models lower precision on purpose (``router(x).float()``, RMS norms in float32), so a model moved to float64 still rounds
to float32 here and there, and a comparison within 1e-9 would show the rounding of the model instead of a mistake of the
program. Inside :func:`all_double` every request for a smaller floating dtype asks for float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwright._torch_compat import GROUPED_PRODUCT

_SMALLER = {torch.float32, torch.float16, torch.bfloat16}
_SMALLER_COMPLEX = {torch.complex64, torch.complex32}
_NARROWING = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_NARROWING_COMPLEX = {torch.Tensor.cfloat, torch.Tensor.chalf}  # type: ignore[attr-defined]  # not in PyTorch's stubs


class _Double(TorchFunctionMode):
    """Asked about every function and every attribute of every tensor; what names no dtype goes on at once."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _NARROWING:
            function = torch.Tensor.double
        elif function in _NARROWING_COMPLEX:
            function = torch.Tensor.cdouble  # type: ignore[attr-defined]  # as above
        elif function is GROUPED_PRODUCT and args[0].dtype == torch.float64 and args[1].dim() == 3:
            function = _grouped_product
        for value in args:
            if value.__class__ is torch.dtype:
                args = tuple(map(_widened, args))
                break
        if kwargs:
            return function(*args, **{key: _widened(value) for key, value in kwargs.items()})
        return function(*args)


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.dtype):
        return value
    return torch.float64 if value in _SMALLER else torch.complex128 if value in _SMALLER_COMPLEX else value


def _grouped_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """PyTorch's product of groups, which has no kernel in double precision: one matrix product per group of rows."""
    ends = offs.tolist()
    groups = zip(weight, [0, *ends[:-1]], ends, strict=True)
    products = [rows[start:end] @ matrix for matrix, start, end in groups]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], weight.shape[2])])


@contextmanager
def all_double(active: bool = True) -> Iterator[None]:
    """Compute in float64 whatever the model's code asks for.

    >>> with all_double():
    ...     torch.ones(2).float().dtype
    torch.float64
    """
    with default_double(active), _Double() if active else nullcontext():
        yield


@contextmanager
def default_double(active: bool = True) -> Iterator[None]:
    """What PyTorch makes of conditions and plain numbers (``0.5 + (x > 0)``) is in float64; nothing else is changed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if active else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
