"""A model on meta becomes shards, and no rank ever holds the whole of it.

Weights come from ``safetensors`` files (each rank reads its own slices), from a ``torch.distributed.checkpoint`` directory,
or from the model's own initialisers, run for one module at a time: the module's own parameters are made on the host, its
``reset_parameters`` (or the model's ``_init_weights``, Hugging Face's way) fills them, this rank cuts out its shard and the
rest is dropped. Every module draws from a seed of its own, made of the default seed and the module's path, so the weights
do not depend on the number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardwright._torch_compat import share_hooks
from shardwright.errors import PlanError, RunError
from shardwright.graph import Buffer, Graph, Parameter
from shardwright.operators.rules import Layout
from shardwright.operators.strategy import Strategy
from shardwright.process_wide import replaced
from shardwright.program.binding import Place, regions
from shardwright.program.dataflow import Dataflow
from shardwright.runtime.shards import cut, device_of, distributed, whole
from shardwright.runtime.stages import Stages
from shardwright.runtime.taken_over import take_over
from shardwright.runtime.weights import Weights, check_names

Initialise = Callable[[torch.nn.Module], Any]
Shards = dict[str, Union[torch.nn.Parameter, Tensor]]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build a model inside and its parameters take no memory, while its buffers (small tables) are real.

    >>> with parameters_on_meta():
    ...     torch.nn.Linear(10**3, 10**3).weight.device
    device(type='meta')
    """

    def moved(register: Any) -> Any:
        def on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
            if param is not None and param.device.type != "meta":
                param = torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)
            register(module, name, param)

        return on_meta

    with replaced(torch.nn.Module, "register_parameter", moved):
        yield


def materialised(
    model: torch.nn.Module,
    stages: Stages,
    weights: str | Path | None = None,
    initialise: Initialise | None = None,
    keep: bool = False,
    strict: bool = True,
) -> Shards:
    """This rank's shards of its stages by the graph's names: cut from real tensors, read from ``weights``, or initialised.

    Unless it is to be kept, the model gives up its real tensors one by one as their shards are made, so that there is at
    no time a second copy of it; what rests whole is not copied at all, and what other ranks hold takes no memory here.
    """
    shards: Shards = {}
    for number in stages.own:
        flow = stages.largest(number).flow
        shards |= _of_stage(model, flow, shards, stages.meshes[number], weights, initialise, keep, strict)
    if not keep:
        _let_go(model, stages.graph, shards)
    return shards


def _of_stage(
    model: torch.nn.Module,
    flow: Dataflow,
    known: Shards,
    mesh: DeviceMesh,
    weights: str | Path | None,
    initialise: Initialise | None,
    keep: bool,
    strict: bool,
) -> Shards:
    """The shards of one stage, without those that another stage of this rank has made already."""
    graph = flow.graph
    parameters = tuple(p for p in graph.parameters if p.tensor not in known)
    buffers = tuple(b for b in graph.buffers if b.tensor not in known)
    flow = replace(flow, graph=replace(graph, ops=(), outputs=(), mutations=(), parameters=parameters, buffers=buffers))
    stored = _stored(model, flow, Path(weights), strict) if weights and not is_checkpoint(weights) else None
    owners = _Owners(model, initialise)
    resting, device = flow.strategy.resting, device_of(mesh)
    made: dict[tuple[str, ...], Union[torch.nn.Parameter, Tensor]] = {}
    shards: Shards = {}
    # One module's parameters follow each other, so that its initialiser runs once.
    entries: list[tuple[Parameter | Buffer, tuple[str, ...]]] = [(p, p.paths) for p in flow.graph.parameters]
    entries += [(b, (b.path,)) for b in flow.graph.buffers]
    for entry, paths in sorted(entries, key=lambda item: item[1][0].rpartition(".")[0]):
        if paths not in made:
            layout, place = resting[entry.tensor], flow.place_of(entry.tensor)
            held = model.get_parameter(paths[0]) if isinstance(entry, Parameter) else model.get_buffer(paths[0])
            shape = held.shape
            local = stored.slice(paths, regions(shape, layout, place)) if stored is not None else None
            filled_later = strict and weights is not None and is_checkpoint(weights)
            if held.is_meta and filled_later and (isinstance(entry, Parameter) or entry.persistent):
                local = torch.empty(flow.local_shape(entry.tensor, layout), dtype=held.dtype)
            if local is None:
                local = cut(owners.whole(paths, held), layout, place)
            # Parameters keep the precision of the model, which may be wider than the plan's; buffers follow the plan.
            computed = getattr(torch, flow.graph.tensors[entry.tensor].dtype)
            dtype = held.dtype if isinstance(entry, Parameter) else computed
            made[paths] = _wrapped(entry, _owned(local, device, dtype, keep), layout, mesh, shape, place)
            if isinstance(entry, Parameter):
                share_hooks(held, made[paths])
            if not keep and not held.is_meta:
                put_in_place(model, paths, made[paths])
            if not keep and isinstance(held, torch.nn.Parameter):
                take_over(held, made[paths])
            del local, held
        shards[entry.tensor] = made[paths]
    owners.drop()
    return shards


def _let_go(model: torch.nn.Module, graph: Graph, shards: Shards) -> None:
    """What other ranks hold takes no memory here."""
    for parameter in graph.parameters:
        if parameter.tensor in shards:
            continue
        held = model.get_parameter(parameter.paths[0])
        if not held.is_meta:
            put_in_place(model, parameter.paths, torch.nn.Parameter(held.detach().to("meta"), held.requires_grad))
        take_over(held, None)


def aside_of(model: torch.nn.Module, stages: Stages) -> dict[str, Tensor]:
    """The buffers that preparing a batch and its tail read, whole: every rank computes these for itself."""
    micro = stages.pipeline.micro
    graphs = [graph for graph in (micro.prepared, micro.tail) if graph is not None]
    read = {name for graph in graphs for op in graph.ops for name in op.inputs}
    found = {b.tensor: whole(model.get_buffer(b.path)) for b in micro.whole.buffers if b.tensor in read}
    for name, tensor in found.items():
        if tensor.is_meta:
            raise RunError(
                f"The buffer {name} is on meta, and every rank of a pipeline needs it to prepare a batch.",
                "Build the model under parameters_on_meta(), which keeps buffers real.",
            )
    return {name: tensor.detach().clone().to(stages.device) for name, tensor in found.items()}


def refuse_uneven_rest(graph: Graph, strategy: Strategy) -> None:
    """Buffers are replaced by what a step computes in shares, and DTensors know equal shards only."""
    uneven = [axis for axis, (name, _) in enumerate(strategy.axes) if name in strategy.shares]
    for name in (buffer.tensor for buffer in graph.buffers if buffer.tensor in strategy.resting):
        if any(isinstance(strategy.resting[name][axis], Shard) for axis in uneven):
            raise PlanError(
                f"{name} rests cut along a mesh axis with shares {dict(strategy.shares)}, which DTensors cannot express.",
                "Let it rest whole along that axis, or cut the axis evenly.",
            )


def _stored(model: torch.nn.Module, flow: Dataflow, path: Path, strict: bool) -> Weights:
    """The files to read from, once their names are known to be the model's."""
    stored = Weights(path)
    persistent = set(model.state_dict())
    wanted = {p.paths: tuple(model.get_parameter(p.paths[0]).shape) for p in flow.graph.parameters}
    wanted |= {(b.path,): tuple(model.get_buffer(b.path).shape) for b in flow.graph.buffers if b.persistent}
    known = {name for names in wanted for name in names}
    shapes = {name: shape for name, shape in stored.shapes.items() if name in known or name not in persistent}
    check_names(path, shapes, wanted, strict)
    return stored


def _owned(local: Tensor, device: torch.device, dtype: torch.dtype, keep: bool) -> Tensor:
    """A contiguous shard in memory of its own; what fills the memory that it lies in may stay there."""
    local = local.detach()
    here = local.to(device=device, dtype=dtype)
    moved = here.untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
    fills = here.is_contiguous() and here.untyped_storage().nbytes() == here.numel() * here.itemsize
    return here if fills and (moved or not keep) else here.clone(memory_format=torch.contiguous_format)


def put_in_place(model: torch.nn.Module, paths: Sequence[str], shard: torch.nn.Parameter | Tensor) -> None:
    """Put the shard where the model held the whole tensor, and so let go of that."""
    for path in paths:
        owner, _, leaf = path.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(shard, torch.nn.Parameter):
            module._parameters[leaf] = shard
        else:
            module._buffers[leaf] = shard


def is_checkpoint(path: str | Path) -> bool:
    """Whether a path is a ``torch.distributed.checkpoint`` directory."""
    return (Path(path) / ".metadata").is_file()


def _wrapped(
    entry: Parameter | Buffer, local: Tensor, layout: Layout, mesh: DeviceMesh, shape: Sequence[int], place: Place
) -> Union[torch.nn.Parameter, Tensor]:
    if isinstance(entry, Parameter):
        return torch.nn.Parameter(distributed(local, mesh, layout, shape, place), requires_grad=entry.trainable)
    return distributed(local, mesh, layout, shape) if any(p.is_shard() for p in layout) else local


class _Owners:
    """Whole tensors of a model, those on meta made by their module's initialiser; one module's at a time are kept."""

    def __init__(self, model: torch.nn.Module, initialise: Initialise | None) -> None:
        self.model, self.initialise = model, initialise
        self._path: str | None = None
        self._module: torch.nn.Module | None = None

    def whole(self, paths: tuple[str, ...], held: Tensor) -> Tensor:
        if not held.is_meta:
            return held.detach()
        owner, _, leaf = paths[0].rpartition(".")
        if self._path != owner or self._module is None:
            self.drop()
            self._module = self._initialised(owner)
            self._path = owner
        return getattr(self._module, leaf).detach()

    def drop(self) -> None:
        """Free the last module's tensors at once: it may sit in a cycle that the collector finds too late."""
        if self._module is not None:
            self._module._parameters.clear()
            self._module._buffers.clear()
            self._module = None

    def _initialised(self, path: str) -> torch.nn.Module:
        module = copy.copy(self.model.get_submodule(path))
        for kind in ("_parameters", "_buffers", "_modules"):
            setattr(module, kind, dict(getattr(module, kind)))
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    empty = torch.empty_like(tensor, device="cpu")
                    real = torch.nn.Parameter(empty, tensor.requires_grad) if own is module._parameters else empty
                    own[name] = real  # type: ignore[assignment]  # parameters to parameters, buffers to buffers
        seed = int.from_bytes(hashlib.sha256(f"{torch.initial_seed()} {path}".encode()).digest()[:7], "little")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            self._fill(module, path)
        return module

    def _fill(self, module: torch.nn.Module, path: str) -> None:
        named: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        model_wide: Any = getattr(self.model, "_init_weights", None)
        if self.initialise is not None:
            self.initialise(module)
        elif callable(model_wide):
            model_wide(module)
        elif callable(named):
            named()
        else:
            raise RunError(
                f"The module {path or 'itself'} ({type(module).__name__}) is on meta and does not say how it is filled.",
                "Give it a reset_parameters method, pass initialise=function(module), or give weights= to load; "
                "parameters_on_meta() keeps buffers real while a model is built.",
            )
