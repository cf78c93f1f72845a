"""Buffers that a module assigns anew (``self.mean = 0.9 * self.mean + 0.1 * x.mean()``) instead of writing into them.

Export sees such an assignment on the outermost module only, and elsewhere the new value would be lost in silence. So the
last value that every buffer was given is written into it when the model's forward ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def written_buffers(model: torch.nn.Module) -> Iterator[None]:
    """While this lasts, what submodules of ``model`` assign to their buffers in its forward is written into them."""
    before: dict[tuple[torch.nn.Module, str], torch.Tensor] = {}

    def remember(module: torch.nn.Module, args: Any) -> None:
        before.clear()
        inner = [part for part in module.modules() if part is not module]
        before.update(
            {(part, name): held for part in inner for name, held in part._buffers.items() if held is not None}
        )

    def write(module: torch.nn.Module, args: Any, output: Any) -> None:
        for (part, name), held in before.items():
            now = part._buffers.get(name)
            # One of another shape is a table made anew for every call: nothing of it is kept.
            if now is None or now is held or now.shape != held.shape or now.dtype != held.dtype:
                continue
            with torch.no_grad():
                held.copy_(now)
            part._buffers[name] = held

    hooks = [model.register_forward_pre_hook(remember), model.register_forward_hook(write)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
