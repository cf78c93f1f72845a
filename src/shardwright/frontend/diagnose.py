"""Turns an exception out of ``torch.export`` into one sentence: which module, which line, why, and what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from shardwright.errors import CaptureError

_TORCH = f"{Path(torch.__file__).parent}/"
_OURS = f"{Path(__file__).parents[1]}/frontend/"

_CAUSES = (
    (
        r"DynamicOutputShape|dynamic output shape|nonzero|masked_select|unbacked symint.*size",
        "the shape of a result depends on tensor values",
        "Use an operator with a fixed output shape: torch.where or a mask instead of boolean indexing or nonzero.",
    ),
    (
        r"[Dd]ata-?dependent|unbacked|GuardOnDataDependent|_local_scalar_dense|item\(\)|\.tolist\(\)",
        "its control flow depends on tensor values",
        "Capture it with real tensors, not on meta: then what the example decides is assumed and checked in every step. "
        "Or replace the branch with torch.where, or pass the value in as a Python argument.",
    ),
    (
        r"device meta|on the meta device|Cannot copy out of meta|meta tensor",
        "it needs the value of a tensor on the meta device",
        "Build the model on the CPU, or keep that value as a Python number.",
    ),
    (
        r"missing (\d+|a) required|required positional|unexpected keyword|got multiple values",
        "the example inputs do not fit its forward",
        "Check the args and kwargs passed to capture.",
    ),
    (
        r"'NoneType' object",
        "something is None there that the model makes by itself only outside of torch.export",
        "Give the optional arguments that it would make (attention_mask, decoder_attention_mask); if it fails eagerly "
        "too, mend that first.",
    ),
    (
        r"[Uu]nsupported|not supported|NotImplementedError|no fake impl|UnsupportedOperator",
        "torch.export does not support something in it",
        "Isolate that part as a custom operator (torch.library.custom_op with register_fake and register_autograd).",
    ),
)


def explain_failure(error: Exception, model: torch.nn.Module) -> CaptureError:
    """The one error a user sees for anything export could not digest."""
    frames = list(_frames(error))
    text = f"{type(error).__name__} {error}"
    causes = [(why, remedy) for pattern, why, remedy in _CAUSES if re.search(pattern, text)]
    unknown = ("torch.export failed on it", "Run the model once eagerly with the same inputs to rule out a plain bug.")
    why, remedy = causes[0] if causes else unknown
    return CaptureError(
        f"Cannot capture {type(model).__name__}: {_place(frames, model)}, {why} ({_first_line(error)}).", remedy
    )


def looks_at_data(error: Exception) -> bool:
    """Whether an export stopped because it would have to know the values of tensors."""
    text = f"{type(error).__name__} {error}"
    return any(re.search(pattern, text) for pattern, _, _ in _CAUSES[:2])


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _place(frames: list[tuple[FrameType, int]], model: torch.nn.Module) -> str:
    """``in module 'decoder.3' (Block) at my/model.py:17``."""
    names = {id(module): name for name, module in model.named_modules()}
    inside = next((owner for frame, _ in reversed(frames) if id(owner := frame.f_locals.get("self")) in names), None)
    path = "" if inside is None else names[id(inside)]
    module = f"in module {path!r} ({type(inside).__name__})" if path else "in its forward"
    lines = [
        f"{short_path(frame.f_code.co_filename)}:{line}"
        for frame, line in frames
        if not frame.f_code.co_filename.startswith((_TORCH, _OURS, "<"))
    ]
    torch_lines = [
        f"{short_path(frame.f_code.co_filename)}:{line}"
        for frame, line in frames
        if frame.f_locals.get("self") is inside and inside is not None
    ]
    found = torch_lines[-1:] if path and type(inside).__module__.startswith("torch.") else lines[-1:]
    return f"{module} at {found[0]}" if found else module


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next((line for line in lines if line), '')[:300]}".rstrip(": .")


def short_path(filename: str) -> str:
    """A path as a reader knows it: from the package down, or the last two parts."""
    if "/site-packages/" in filename:
        return filename.split("/site-packages/")[-1]
    return "/".join(filename.split("/")[-2:])
