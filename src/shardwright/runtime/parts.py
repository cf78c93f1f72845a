"""The submodules of a parallelized module: they hold parameters and buffers under their names, and never run.

The program computes across their borders, so there is no moment at which "the module has been called", and what hooks
would be handed may not exist on any rank. Registering such a hook is therefore refused; hooks on parameters, on the
parallelized module itself and those of ``state_dict`` work.
"""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch

from shardwright._torch_compat import module_hooks
from shardwright.errors import RunError

_ELSEWHERE = "Register it on the parallelized module or on a parameter, or return the value from the model's forward."


class Part(torch.nn.Module):
    """A place in the module tree."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(f"The submodule {self._path} does not run by itself.", "Call the parallelized module.")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(
            f"The submodule {self._path} is never called, so that a hook on it would never fire.", _ELSEWHERE
        )

    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


def look_at_hooks(model: torch.nn.Module) -> None:
    """Before a model is split: hooks that would be lost are refused, those that were traced are spoken of."""
    traced = []
    for path, module in model.named_modules():
        forward, backward = module_hooks(module)
        if backward:
            raise RunError(
                f"The module {path or type(model).__name__} has backward hooks, which a split model would never call.",
                f"Remove them before parallelize(). {_ELSEWHERE}",
            )
        traced += [path or type(model).__name__] if forward else []
    if traced:
        more = f" and {len(traced) - 3} more" if len(traced) > 3 else ""
        warnings.warn(
            f"The forward hooks of {', '.join(traced[:3])}{more} ran once, when the model was captured: what they compute "
            "is part of the program, what else they do (printing, storing) will not happen.",
            stacklevel=3,
        )
