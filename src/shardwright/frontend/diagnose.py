"""Turns an exception out of ``torch.export`` into one sentence: which module, which line, why, and what to try."""

from __future__ import annotations

import re
import traceback

import torch

from shardwright.errors import CaptureError

_REMEDIES = (
    (
        r"[Dd]ata-?dependent|unbacked|GuardOnDataDependent|_local_scalar_dense|item\(\)",
        "the model's control flow or a shape depends on tensor values",
        "Replace the branch with torch.where / torch.cond, or fix the value as a Python argument.",
    ),
    (
        r"[Uu]nsupported|not supported|NotImplementedError",
        "the model uses something torch.export does not support",
        "Try torch.export.export(model, ...) alone for its full report; isolate that part as a custom operator.",
    ),
    (
        r"missing|required positional|unexpected keyword|got multiple values",
        "the example inputs do not fit the model's forward",
        "Check the args and kwargs passed to capture.",
    ),
)


def explain_failure(error: Exception, model: torch.nn.Module) -> CaptureError:
    """The one error a user sees for anything export could not digest."""
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    text = f"{type(error).__name__} {error}"
    matches = [(why, remedy) for pattern, why, remedy in _REMEDIES if re.search(pattern, text)]
    unknown = ("torch.export failed", "Run the model once eagerly with the same inputs to rule out a plain bug.")
    why, remedy = matches[0] if matches else unknown
    return CaptureError(
        f"Cannot capture {type(model).__name__} at {_user_line(error)}: {why} ({first_line[:300]}).", remedy
    )


def _user_line(error: Exception) -> str:
    """The innermost frame that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if "/torch/" not in frame.filename and "/shardwright/" not in frame.filename and frame.filename[0] != "<":
            return f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"
    return "an unknown line"


def _short(filename: str) -> str:
    """A path as a reader knows it: from the package down, or the last two parts."""
    return (
        filename.split("/site-packages/")[-1] if "/site-packages/" in filename else "/".join(filename.split("/")[-2:])
    )
