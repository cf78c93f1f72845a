"""What is replaced while a model is being traced: a custom ``autograd.Function`` is called as one operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.frontend.custom_functions import call_whole


@contextmanager
def whole_functions() -> Iterator[None]:
    """Keep custom autograd functions whole for the duration of one export; torch's own are traced as usual."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        return call_whole(cls, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment] # restored below
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign] # the original descriptor
