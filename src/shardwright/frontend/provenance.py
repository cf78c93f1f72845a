"""Where in the model something comes from: which frames are the model's, a node's module, and its line."""

from __future__ import annotations

import re
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = f"{Path(torch.__file__).parent}/"
_OURS = Path(__file__).parents[1]
_MODELS = f"{_OURS}/zoo/"
_CAPTURE = f"{_OURS}/frontend/capture.py"
_PYTHON = f"{sysconfig.get_path('stdlib')}/"


@lru_cache(maxsize=4096)
def of_the_model(filename: str) -> bool:
    """Whether a file is the model's: neither PyTorch's, nor this package's (whose models to try it on are), nor
    Python's own, nor generated.

    >>> of_the_model("/home/me/model.py"), of_the_model(torch.__file__), of_the_model(__file__)
    (True, False, False)
    """
    if filename.startswith((_TORCH, "<")) or (filename.startswith(_PYTHON) and "-packages/" not in filename):
        return False
    return filename.startswith(_MODELS) or not filename.startswith(f"{_OURS}/")


def asking_frame() -> FrameType | None:
    """The innermost frame of the model that is being captured; where it has none of its own (it is one of PyTorch's
    modules), that of the innermost module."""
    frame: FrameType | None = sys._getframe(1)
    module: FrameType | None = None
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        if of_the_model(frame.f_code.co_filename):
            return frame
        if module is None and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            module = frame
        frame = frame.f_back
    return module


def asking_line() -> str:
    """``package/file.py:line`` of that frame."""
    frame = asking_frame()
    return "" if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def short_path(filename: str) -> str:
    """A path as a reader knows it: from the package down, or the last two parts."""
    if "/site-packages/" in filename:
        return filename.split("/site-packages/")[-1]
    return "/".join(filename.split("/")[-2:])


def module_of(node: Node) -> str:
    """The path of the innermost module: ``decoder.layers.3.attention``."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def source_of(node: Node) -> str:
    """The innermost line of the model's own code, or of PyTorch's modules where it has none: ``package/file.py:line``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    # Not what watches every call of a trace: such frames of ours are the innermost of all.
    others = [frame for frame in frames if not frame[0].startswith(f"{_OURS}/")]
    own = [frame for frame in frames if of_the_model(frame[0])] or others
    return f"{short_path(own[-1][0])}:{own[-1][1]}" if own else ""
