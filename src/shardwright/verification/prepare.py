"""A model made ready to be compared: built from a fixed seed, its random numbers settled, in double precision if asked for.

Training mode stays on. Everything that is changed is said in words.

Models lower precision on purpose (``router(x).float()``, RMS norms in float32), so a model moved to float64 still rounds to
float32 here and there, and a comparison within 1e-9 would show the rounding of the model instead of a mistake of the
program. Inside :func:`all_double` every request for a smaller floating dtype asks for float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwright._torch_compat import GROUPED_PRODUCT, map_tree
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.frontend.containers import register_containers
from shardwright.graph import Graph
from shardwright.verification.batches import Steps, varied
from shardwright.verification.draws import (
    MASKS,
    NUMBERS,
    Draws,
    changed_by,
    handing_out,
    quiet,
    without_fused_dropout,
    written_down,
)
from shardwright.verification.ignored import with_ignored_labels
from shardwright.verification.shown import Shown, shown

Build = Callable[[], tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]]


@dataclass(frozen=True)
class Subject:
    """What is compared: a model, a batch, its graph, and what was changed so that it can be compared, in words.

    ``shown`` is the graph that also returns what it draws, where the model draws and one process can be given that.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graph: Graph
    changes: tuple[str, ...] = ()
    shown: Shown | None = None

    def steps(self, count: int) -> Steps:
        """The batches of so many steps."""
        return varied(self.model, self.graph, self.args, self.kwargs, count, torch.is_grad_enabled())


def built(build: Build) -> tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """What ``build`` gives, alike in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, args, kwargs = build()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunError(
            f"{type(model).__name__} has no parameter to train, so there is no gradient to compare.",
            "Give a model with parameters that require gradients.",
        )
    register_containers((args, kwargs))
    return model, tuple(args), kwargs


def subject(
    build: Build, double: bool, planned: bool = False, captured: Callable[[Callable[[], Graph]], Graph] | None = None
) -> Subject:
    """The model to compare, in double precision or its own.

    A model that draws random numbers keeps them where one process can be given what the plan draws. Otherwise they become
    fixed ones; but where a plan for the very operators of the model is given (``planned``), its graph must stay, and dropout
    is switched off. ``captured`` gives the graph in place of capturing it here: it is handed the capture, to be called where
    it shall be done.
    """
    model, args, kwargs = built(build)
    draws = Draws() if planned else written_down(model, args, kwargs)

    def captured_graph() -> Graph:
        with all_double(double):
            here = functools.partial(capture, model, args, kwargs)
            return here() if captured is None else captured(here)

    if double:
        model, args, kwargs = widened(model, args, kwargs)
    graph = captured_graph()
    if planned:  # only now: what is switched off before the numbers are written down belongs to the plan's graph
        with all_double(double):
            draws = written_down(model, args, kwargs)
    changes, found = changed_by(draws), None
    if draws.values or draws.notes:
        found = shown(without_fused_dropout(graph), draws)
        if found is not None:
            graph = without_fused_dropout(graph)
            changes = [text for text in changes if not text.startswith((MASKS, NUMBERS))]
        elif planned and draws.values:
            graph, changes = quiet(graph)
            model = without_dropout(model)
        else:
            model = handing_out(model, draws)
            graph = captured_graph() if draws.values else without_fused_dropout(graph)
    args, kwargs, labels = with_ignored_labels(graph, args, kwargs)
    return Subject(model, args, kwargs, graph, (*changes, *([labels] if labels else [])), found)


def quieted(it: Subject) -> Subject:
    """The same where no process can be given what another one drew: without dropout."""
    graph, changes = quiet(it.graph)
    return replace(it, model=without_dropout(it.model), graph=graph, changes=(*it.changes, *changes), shown=None)


_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Set every rate whose name speaks of dropping to zero, in modules and in the configurations they carry."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
    return model


def widened(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its inputs in float64, complex numbers in complex128."""

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.double() if leaf.is_floating_point() else leaf.to(torch.complex128) if leaf.is_complex() else leaf

    model = model.double()
    for module in _listed(model):
        module.double()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():  # PyTorch's double() leaves them as they are
            tensor.data = tensor.data.to(torch.complex128)
    for module in model.modules():  # nor tensors that are attributes like any other
        vars(module).update(
            {name: wide(value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        )
    return model, map_tree(wide, tuple(args)), map_tree(wide, dict(kwargs))


def _listed(model: nn.Module) -> list[nn.Module]:
    """Modules in plain lists, which are none of the model's to PyTorch (OneFormer's projections)."""
    own, found = {*model.modules()}, dict[nn.Module, None]()
    for module in model.modules():
        lists = [value for value in vars(module).values() if isinstance(value, list | tuple)]
        found |= dict.fromkeys(each for value in lists for each in value if isinstance(each, nn.Module))
    return [module for module in found if module not in own]


_SMALLER = {torch.float32, torch.float16, torch.bfloat16}
_SMALLER_COMPLEX = {torch.complex64, torch.complex32}
_NARROWING = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_NARROWING_COMPLEX = {torch.Tensor.cfloat, torch.Tensor.chalf}  # type: ignore[attr-defined]  # not in PyTorch's stubs


class _Double(TorchFunctionMode):
    """Asked about every function and every attribute of every tensor; what names no dtype goes on at once."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _NARROWING:
            function = torch.Tensor.double
        elif function in _NARROWING_COMPLEX:
            function = torch.Tensor.cdouble  # type: ignore[attr-defined]  # as above
        elif function is GROUPED_PRODUCT and args[0].dtype == torch.float64 and args[1].dim() == 3:
            function = _grouped_product
        for value in args:
            if value.__class__ is torch.dtype:
                args = tuple(map(_widened, args))
                break
        if kwargs:
            return function(*args, **{key: _widened(value) for key, value in kwargs.items()})
        return function(*args)


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.dtype):
        return value
    return torch.float64 if value in _SMALLER else torch.complex128 if value in _SMALLER_COMPLEX else value


def _grouped_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """PyTorch's product of groups, which has no kernel in double precision: one matrix product per group of rows."""
    ends = offs.tolist()
    groups = zip(weight, [0, *ends[:-1]], ends, strict=True)
    products = [rows[start:end] @ matrix for matrix, start, end in groups]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], weight.shape[2])])


@contextmanager
def all_double(active: bool = True) -> Iterator[None]:
    """Compute in float64 whatever the model's code asks for.

    >>> with all_double():
    ...     torch.ones(2).float().dtype
    torch.float64
    """
    with default_double(active), _Double() if active else nullcontext():
        yield


@contextmanager
def default_double(active: bool = True) -> Iterator[None]:
    """What PyTorch makes of conditions and plain numbers (``0.5 + (x > 0)``) is in float64; nothing else is changed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if active else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
