"""What is replaced while a model is being traced: a custom ``autograd.Function`` is called as one operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from shardwright.frontend.custom_functions import call_whole

_MACHINERY = ("torch._", "torch.fx", "torch.export", "torch.library")


@contextmanager
def whole_functions() -> Iterator[None]:
    """Keep custom autograd functions whole for the duration of one export; those of the tracer are left alone."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(_MACHINERY):
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            # It recomputes and does not change what is computed; traced as it is, its body would count as no_grad.
            body, _preserve_random_state, *inputs = args
            return body(*inputs)
        return call_whole(cls, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment] # restored below
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign] # the original descriptor
