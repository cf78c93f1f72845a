"""From an unmodified ``nn.Module`` to a :class:`~shardwright.graph.Graph`.

The model is exported with ``torch.export`` (non-strict, training IR), so composite operators such as ``linear`` or
``scaled_dot_product_attention`` stay whole and nothing is materialised. Then regions are inlined, in-place operators
made functional, assertions dropped, and the result is rewritten in our own words. What cannot be captured ends in one
:class:`CaptureError` that names the module and the line.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from typing import Any

import torch

from shardwright._torch_compat import (
    flatten_tree,
    has_data,
    map_tree,
    short_traces,
    sources_forgotten,
    unwritten_modules,
    without_torchscript,
)
from shardwright.errors import CaptureError
from shardwright.frontend.assumptions import Answers, answers_of, assuming
from shardwright.frontend.buffers import written_buffers
from shardwright.frontend.checks import skipped_checks
from shardwright.frontend.containers import opened_outputs, register_containers
from shardwright.frontend.convert import convert
from shardwright.frontend.diagnose import calls_int, explain_failure, looks_at_data
from shardwright.frontend.fake import stand_in
from shardwright.frontend.functionalise import functionalise
from shardwright.frontend.guards import ReplacedFunctions, as_in_eager_mode, one_process, whole_functions
from shardwright.frontend.masks import dense_masks
from shardwright.frontend.prune import assumptions
from shardwright.frontend.randomness import inert_randomness
from shardwright.frontend.regions import inline_regions
from shardwright.frontend.rewriting import drop_assertions, scatter_pairs, without_strides
from shardwright.frontend.scalars import numbers_of_data
from shardwright.frontend.unknown_extents import ENCLOSED, UnknownResultError, enclose_unknown_extents
from shardwright.frontend.vmapped import batched_operators
from shardwright.graph import Graph


@sources_forgotten()  # and so one thread at a time
def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    look_at_data: bool = True,
) -> Graph:
    """Capture one forward call of ``model`` as a graph.

    Parameters
    ----------
    model
        Any module; on the meta device nothing is materialised. Its ``training`` flag decides the mode captured.
    args, kwargs
        Example inputs. Shapes and dtypes count, and values only where the model decides by them (then the example's
        decision is assumed, and checked whenever the graph runs); plain values (numbers, flags) are fixed. In training a
        cache that a model returns beside its loss is left out of the graph, unless ``use_cache=True`` asks for it.
    look_at_data
        Whether the example's values may be looked at where the model decides by them; otherwise such a model is refused.

    Raises
    ------
    CaptureError
        When the model cannot be exported, returns a shape that depends on data, or changes its inputs in place.

    Examples
    --------
    >>> graph = capture(torch.nn.Linear(8, 4), (torch.zeros(2, 8),))
    >>> [op.target for op in graph.ops]
    ['aten.linear.default']
    """
    _refuse_autocast(model)
    _refuse_lazy(model)
    register_containers((args, kwargs), given=True)
    call: tuple[tuple[Any, ...], dict[str, Any]] = _distinct_inputs((tuple(args), dict(kwargs or {})))
    try:
        return _captured(model, *call, None)
    except CaptureError as refusal:
        stopped = refusal.__cause__ if isinstance(refusal.__cause__, Exception) else None
        if not isinstance(refusal, UnknownResultError) and not (stopped and looks_at_data(stopped)):
            raise
        answers = _answers(model, *call) if look_at_data else None
        if stopped and calls_int(stopped):
            with suppress(CaptureError):
                return _with_numbers_of_data(model, *call, answers)
        if answers is None:
            raise
    try:
        return _captured(model, *call, answers)
    except CaptureError as refusal:
        # Last, with as many rows as the example selects: it holds for fewer batches.
        try:
            return _captured(model, *call, dataclasses.replace(answers, shapes=True))
        except CaptureError:
            raise refusal from None


def _answers(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answers | None:
    """What the model reads from its data in an eager run, if there are values."""
    if not _all_real((args, kwargs, *model.parameters(), *model.buffers())):
        return None
    try:
        with _quiet(), one_process():
            return answers_of(model, args, kwargs)
    except Exception as error:
        raise explain_failure(error, model, True) from error


def _with_numbers_of_data(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Answers | None
) -> Graph:
    """A graph that reads the numbers of ``int(x)`` in every step."""
    with numbers_of_data(model):
        graph = _captured(model, args, kwargs, answers)
    weights = {parameter.tensor for parameter in graph.parameters}
    if any(op.target == ENCLOSED and weights.intersection(op.inputs) for op in graph.ops):
        raise CaptureError("Too much hangs on numbers of the data: every rank would compute it whole.", "Assume them.")
    return graph


def _captured(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Answers | None) -> Graph:
    """Export and convert, with the answers of an eager run to what the model asks of its data."""
    traced = model
    try:
        with ExitStack() as while_tracing:
            changes = (_quiet, short_traces, unwritten_modules, whole_functions, inert_randomness, one_process)
            for change in (*changes, skipped_checks, batched_operators, without_torchscript):
                while_tracing.enter_context(change())
            while_tracing.enter_context(ReplacedFunctions())
            traced, args, kwargs = stand_in(model, args, kwargs)
            everything = not model.training or kwargs.get("use_cache") is True
            packed = kwargs.get("position_ids") is not None
            while_tracing.enter_context(written_buffers(traced))
            with opened_outputs(traced, everything) as (left_out, given), as_in_eager_mode(packed), assuming(answers):
                program = torch.export.export(traced, args, kwargs, strict=False)
            inline_regions(program.graph_module)
            drop_assertions(program.graph)
            program = functionalise(program)
            without_strides(program.graph)
            scatter_pairs(program.graph)
            enclose_unknown_extents(program)
            dense_masks(program.graph)
            graph = convert(program, model, given)
    except CaptureError:
        raise
    except Exception as error:
        raise explain_failure(error, traced, answers is not None) from error
    notes = [
        f"{name} is left out of what the training step returns beside the loss; use_cache=True asks for it."
        for name in dict.fromkeys(left_out)
    ]
    notes += [
        f"The model looks at its data at {op.args[2]}; the graph is for {op.args[1]}, and every step checks that."
        for op in assumptions(graph)
    ]
    return dataclasses.replace(graph, notes=(*graph.notes, *dict.fromkeys(notes)))


def _all_real(tree: Any) -> bool:
    return all(has_data(leaf) for leaf in flatten_tree(tree)[0] if isinstance(leaf, torch.Tensor))


def _refuse_autocast(model: torch.nn.Module) -> None:
    """An exported graph has the dtypes of an autocast around it and none of its casts."""
    held = next((tensor for tensor in (*model.parameters(), *model.buffers())), None)
    for kind in {"cpu", held.device.type if held is not None and not held.is_meta else "cpu"}:
        if torch.is_autocast_enabled(kind):
            raise CaptureError(
                f"The model is captured under torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)}).",
                "Capture it outside; for mixed precision build it in the lower one (model.to(torch.bfloat16)), plan it, and "
                "call parallelize(float32_model, plan, compute_dtype=torch.bfloat16).",
            )


def _refuse_lazy(model: torch.nn.Module) -> None:
    """Parameters of lazy modules have no shape before the first call."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise CaptureError(
                f"Cannot capture {type(model).__name__}: {name} has no shape yet, because its module is lazy and was never "
                "called.",
                "Call the model once on the example inputs before (model(*args, **kwargs)), or give the module its sizes.",
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's warnings, logs and printed graphs from the user; what matters of them is in our own error."""
    log = logging.getLogger("torch")
    level = log.level
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        log.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            log.setLevel(level)


def _distinct_inputs(tree: Any) -> Any:
    """Give every leaf its own tensor: export merges inputs that are one object (``labels=input_ids`` is common)."""
    seen: set[int] = set()

    def distinct(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in seen:
            return leaf.clone()
        seen.add(id(leaf))
        return leaf

    return map_tree(distinct, tree)
