"""What must be watched while a model is being traced.

``torch.export`` traces through a custom ``autograd.Function`` and silently drops its backward, so the exported graph
would train with other gradients. The guard notices the first call of one and refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.errors import CaptureError


@contextmanager
def export_guards(model: torch.nn.Module) -> Iterator[None]:
    """Refuse custom autograd functions for the duration of one export."""
    original = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        raise CaptureError(
            f"The model calls the custom autograd.Function {cls.__module__}.{cls.__qualname__}, and export would drop its "
            "backward.",
            "Wrap it with torch.library.custom_op and register_autograd, and describe it with shardwright.describe.",
        )

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[method-assign, assignment] # restored below
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign] # the original descriptor
