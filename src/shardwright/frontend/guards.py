"""What is replaced while a model is being traced.

A custom ``autograd.Function`` is called as one operator. And models that ask ``torch.compiler.is_exporting()`` hear
no: they ask in order to export for shapes not known yet (Hugging Face then builds attention masks instead of setting
``is_causal``), while our graphs are for the shapes given, and shall hold what the model does in eager mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from shardwright._torch_compat import PACKING
from shardwright.errors import CaptureError
from shardwright.frontend.checks import answered_tensor
from shardwright.frontend.ctc import recorded_ctc_loss
from shardwright.frontend.custom_functions import call_whole
from shardwright.frontend.provenance import asking_line
from shardwright.frontend.scalars import detached, tensor_of
from shardwright.process_wide import replaced

_TORCH = f"{Path(torch.__file__).parent}/"
_MACHINERY = ("torch._", "torch.fx", "torch.export", "torch.library")


@contextmanager
def whole_functions() -> Iterator[None]:
    """Keep custom autograd functions whole for the duration of one export; those of the tracer are left alone."""

    def whole(real: Any) -> Any:
        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls.__module__.startswith(_MACHINERY):
                return real(cls, *args, **kwargs)
            if cls is CheckpointFunction:
                # It recomputes and does not change what is computed; traced as it is, its body would count as no_grad.
                body, _preserve_random_state, *inputs = args
                return body(*inputs)
            return call_whole(cls, args)

        return apply

    with replaced(torch.autograd.Function, "apply", whole):
        yield


@contextmanager
def one_process() -> Iterator[None]:
    """Models that ask for a process group hear that there is none: a plan splits what one process computes, and what FLAVA
    would gather from the others by itself would be gathered twice."""
    with ExitStack() as stack:
        for name, answer in (("is_initialized", False), ("get_rank", 0), ("get_world_size", 1)):
            stack.enter_context(replaced(torch.distributed, name, _always(answer)))
        yield


def _always(answer: Any) -> Any:
    return lambda real: lambda *args, **kwargs: answer


def _refuse_packing(*_: Any) -> Any:
    """Packed sequences have as many rows as all lengths together."""
    raise CaptureError(
        f"At {asking_line()} sequences are packed (pack_padded_sequence): how many rows that makes depends on their "
        "lengths, and a graph has fixed shapes.",
        "Give the recurrent module the padded batch and leave padded positions out of the loss (ignore_index, or a mask "
        "made of the lengths). A direction that runs backwards would read the padding first: reverse every sequence by its "
        "own length with torch.gather, run a second module forwards over that, and reverse its result.",
    )


def _refuse_gradients(*_: Any, **__: Any) -> Any:
    """What autograd runs inside of a forward is not traced: its results would become constants."""
    raise CaptureError(
        f"At {asking_line()} the model calls torch.autograd.grad in its forward, and that gradient's operators cannot be "
        "captured.",
        "Write that gradient out as operators, or make both a torch.library.custom_op with register_fake and "
        "register_autograd.",
    )


class ReplacedFunctions(TorchFunctionMode):
    """Within this mode a few functions do something else. One mode for all: every call of a trace goes through it."""

    _instead: ClassVar = {
        torch.nn.functional.ctc_loss: recorded_ctc_loss,
        torch.Tensor.__bool__: answered_tensor,
        PACKING: _refuse_packing,
        torch.autograd.grad: _refuse_gradients,
        torch.tensor: tensor_of,
        torch.Tensor.data.__get__: detached,  # type: ignore[attr-defined]  # a property of C
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def as_in_eager_mode(packed: bool) -> Iterator[None]:
    """Let the model take the way it takes in eager mode where it distinguishes.

    ``packed`` says that the call gives positions of its own, several sequences in a row perhaps. Without them Hugging Face
    counts positions itself; it still looks in them for a second sequence, and rules it out by their values in eager mode.
    """
    masking = sys.modules.get("transformers.masking_utils")
    searches = getattr(masking, "find_packed_sequence_indices", None) is not None

    def answer(real: Any) -> Any:
        def is_exporting() -> bool:
            asker = sys._getframe(2)  # the first is the replacement that asks us
            return real() if asker.f_code.co_filename.startswith(_TORCH) else False

        return is_exporting

    with ExitStack() as changes:
        changes.enter_context(replaced(torch.compiler, "is_exporting", answer))
        if searches and not packed:
            none_found = replaced(masking, "find_packed_sequence_indices", lambda real: lambda position_ids: None)
            changes.enter_context(none_found)
        yield
