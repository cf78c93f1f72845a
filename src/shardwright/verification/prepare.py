"""A model made ready to be compared: built from a fixed seed, its random numbers settled, in double precision if asked for.

Training mode stays on. Everything that is changed is said in words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright._torch_compat import map_tree
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.frontend.containers import register_containers
from shardwright.graph import Graph
from shardwright.verification.draws import quiet, settled
from shardwright.verification.ignored import with_ignored_labels
from shardwright.verification.precision import all_double

Build = Callable[[], tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]]


@dataclass(frozen=True)
class Subject:
    """What is compared: a model, a batch, its graph, and what was changed so that it can be compared, in words."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graph: Graph
    changes: tuple[str, ...] = ()


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

    ``planned``: a plan for the very operators of the model is given, so that its graph must stay; dropout is switched off
    then. Otherwise the model's random numbers become fixed ones. ``captured`` gives the graph in place of capturing it
    here: it is handed the capture, to be called where it shall be done.
    """
    model, args, kwargs = built(build)
    if not planned:
        model, changes = settled(model, args, kwargs)
    if double:
        model, args, kwargs = widened(model, args, kwargs)
    with all_double(double):
        here = functools.partial(capture, model, args, kwargs)
        graph = here() if captured is None else captured(here)
    if planned:
        graph, changes = quiet(graph)
        model = without_dropout(model)
    args, kwargs, labels = with_ignored_labels(graph, args, kwargs)
    return Subject(model, args, kwargs, graph, (*changes, *([labels] if labels else [])))


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
    """The model and its inputs in float64."""

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return model.double(), map_tree(wide, tuple(args)), map_tree(wide, dict(kwargs))
