"""Turns an exception out of ``torch.export`` into one sentence: which module, which line, why, and what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType

import torch

from shardwright.errors import CaptureError
from shardwright.frontend.provenance import of_the_model, short_path

_CAUSES = (
    (
        r"NestedTensor|nested_tensor|SymInt.*not tracked with proxy",
        "it makes a nested tensor, whose rows have lengths of their own",
        "Pad the rows to one length, and leave padded positions out with a mask.",
    ),
    (
        r"DynamicOutputShape|dynamic output shape|nonzero|masked_select|unbacked symint.*size",
        "the shape of a result depends on tensor values",
        "Use an operator with a fixed output shape: torch.where or a mask instead of boolean indexing or nonzero.",
    ),
    (
        r"[Dd]ata-?dependent|unbacked|GuardOnDataDependent|_local_scalar_dense|item\(\)|\.tolist\(\)",
        "its control flow depends on tensor values",
        "Decide with torch.where, or pass the value in as a Python argument.",
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


_NUMBER = r"\bu\d+\b"
"""How an export names a number that only the data knows; a model's own error may quote it."""
_REAL = (
    " Or capture it from Python with the model and its inputs on the CPU: what the example decides is then assumed, and "
    "checked in every step."
)
"""More that helps a model whose tensors hold no values."""


def explain_failure(error: Exception, model: torch.nn.Module, real: bool) -> CaptureError:
    """The one error a user sees for anything export could not digest; ``real`` where the example's values were looked at."""
    frames = list(_frames(error))
    text = f"{type(error).__name__} {error}"
    causes = [(why, remedy) for pattern, why, remedy in _CAUSES if re.search(pattern, text)]
    unknown = ("torch.export failed on it", "Run the model once eagerly with the same inputs to rule out a plain bug.")
    why, remedy = causes[0] if causes else unknown
    if not real and looks_at_data(error):
        remedy += _REAL
    return CaptureError(
        f"Cannot capture {type(model).__name__}: {_place(frames, model)}, {why} ({_first_line(error)}).", remedy
    )


def explain_own_failure(error: Exception, model: torch.nn.Module) -> CaptureError:
    """Of a model that fails by itself, before anything of ours has looked at it."""
    place = _place(list(_frames(error)), model)
    return CaptureError(
        f"{type(model).__name__} does not run by itself with these inputs: {place} ({_first_line(error)}).",
        "Give inputs, or sizes, that the model takes.",
    )


def looks_at_data(error: Exception) -> bool:
    """Whether an export stopped because it would have to know the values of tensors."""
    text = f"{type(error).__name__} {error}"
    return any(re.search(pattern, text) for pattern in (_NUMBER, *(pattern for pattern, _, _ in _CAUSES[1:3])))


def calls_int(error: Exception) -> bool:
    """Whether the model's own code that stopped an export calls ``int``."""
    own = [frame.f_code for frame, _ in _frames(error) if of_the_model(frame.f_code.co_filename)]
    return bool(own) and "int" in own[-1].co_names


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _place(frames: list[tuple[FrameType, int]], model: torch.nn.Module) -> str:
    """``in module 'decoder.3' (Block) at my/model.py:17``: the innermost line of the model's own code, also where the module
    that failed is one of PyTorch's; a line of PyTorch where there is none (a model that is one of its modules)."""
    names = {id(module): name for name, module in model.named_modules()}
    modules = [i for i, (frame, _) in enumerate(frames) if id(frame.f_locals.get("self")) in names]
    owner = frames[modules[-1]][0].f_locals["self"] if modules else model
    module = f"in module {names[id(owner)]!r} ({type(owner).__name__})" if names.get(id(owner)) else "in its forward"
    inside = frames[modules[0] :] if modules else frames  # not what called the model
    shown = [f for f in inside if of_the_model(f[0].f_code.co_filename)] or [frames[i] for i in modules]
    return f"{module} at {short_path(shown[-1][0].f_code.co_filename)}:{shown[-1][1]}" if shown else module


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next((line for line in lines if line), '')[:300]}".rstrip(": .")
