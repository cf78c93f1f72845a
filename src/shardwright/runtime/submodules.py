"""What stands for the modules of the original model: parameters, buffers, attributes and methods under their names.

A method of the original's class is called on what stands for it, so that ``model.config``, properties and helpers work
unchanged. Submodules never run: the program computes across their borders, so there is no moment at which one "has been
called", and what hooks would be handed may not exist on any rank. Registering such a hook is therefore refused; hooks on
parameters, on the parallelized module itself and those of ``state_dict`` work.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import module_hooks
from shardwright.errors import RunError
from shardwright.graph import Buffer, Graph, Parameter
from shardwright.runtime.shards import cut_like

_ELSEWHERE = "Register it on the parallelized module or on a parameter, or return the value from the model's forward."


_OWN = frozenset(vars(torch.nn.Module()))
_MISSING = object()


class StandIn(torch.nn.Module):
    """A module that stands for one of the original model: what it lacks is looked up there."""

    def stand_for(self, original: torch.nn.Module | None) -> None:
        """Remember the class and the plain attributes of the original, not the original: its tensors are given up."""
        known = {} if original is None else vars(original)
        kept = {k: v for k, v in known.items() if k not in _OWN and not isinstance(v, torch.nn.Module | torch.Tensor)}
        self.__dict__["_original"] = (type(original), kept)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            kind, attributes = original_of(self)
            if name in attributes:
                return attributes[name]
            found = _MISSING if name.startswith("__") else inspect.getattr_static(kind, name, _MISSING)
            if found is _MISSING:
                raise
            return found.__get__(self, type(self)) if hasattr(found, "__get__") else found


def original_of(stand_in: StandIn) -> tuple[type, dict[str, Any]]:
    """The class of the module that this stands for, and its plain attributes."""
    return stand_in.__dict__.get("_original", (object, {}))


def as_original(stand_in: StandIn, forward: Callable[..., Any]) -> Any:
    """An object of the original's own class, for code that asks for one, with our tensors and this ``forward``."""
    kind, attributes = original_of(stand_in)

    @functools.wraps(kind.forward)  # type: ignore[attr-defined]  # a module's class
    def called(_: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    twin: Any = object.__new__(type(kind.__name__, (kind,), {"forward": called}))
    torch.nn.Module.__init__(twin)
    twin.__dict__.update(attributes)
    for tree in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[tree] = getattr(stand_in, tree)
    twin.training = stand_in.training
    return twin


class Submodule(StandIn):
    """A place in the module tree; lists, sequences and dictionaries of modules are opened as ever."""

    def __init__(self, path: str, original: torch.nn.Module | None = None) -> None:
        super().__init__()
        self._path = path
        self.stand_for(original)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._modules[key]
        return list(self._modules.values())[key]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Any:
        return iter(self._modules.values())

    def __bool__(self) -> bool:
        return True

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(f"The submodule {self._path} does not run by itself.", "Call the parallelized module.")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(
            f"The submodule {self._path} is never called, so that a hook on it would never fire.", _ELSEWHERE
        )

    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


class SplitModel(StandIn):
    """A whole model: holds parameters and buffers under the paths they have in the original."""

    own_names: ClassVar[tuple[str, ...]] = ()
    """Attributes of this kind of module that are no model's."""

    def _resemble(self, original: torch.nn.Module | None) -> None:
        """The tree of modules, attributes and methods of the original."""
        if isinstance(original, SplitModel):
            self.__dict__["_original"] = original.__dict__["_original"]
        else:
            self.stand_for(original)
        for path, module in () if original is None else original.named_modules(remove_duplicate=False):
            if path:
                self._part(path, module)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Of whole weights, as one process stores them, this rank takes its parts; what other ranks hold is not strange."""
        for name in names_elsewhere(self):
            state_dict.pop(prefix + name, None)
        for name, own in self.state_dict(prefix=prefix).items():
            if name in state_dict:
                state_dict[name] = as_part(state_dict[name], own)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _become(self, twin: SplitModel) -> None:
        """Be what another module is: its tensors and programs, with one's own hooks, mode and whatever hangs on it."""
        if type(self) is not type(twin):  # what the other kind of module kept for itself
            for name in [name for name in vars(self) if name.startswith("_") or name in self.own_names]:
                if name not in vars(twin):
                    del self.__dict__[name]
        for name, value in vars(twin).items():
            if "hook" not in name and name != "training":
                self.__dict__[name] = value
        self.__class__ = type(twin)
        self.train(self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with parameters and buffers of its own, on the same process groups (``AveragedModel`` makes one)."""
        tensors: dict[str, torch.nn.Parameter | torch.Tensor] = {}
        for name, (held, key) in self._home.items():
            old = held[key]
            new = old.detach().clone()
            tensors[name] = torch.nn.Parameter(new, old.requires_grad) if isinstance(old, torch.nn.Parameter) else new
            memo[id(old)] = tensors[name]
        twin = self._twin(tensors)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            if name not in vars(twin):  # what the loop hung on the module
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin.train(self.training)

    def _twin(self, tensors: Mapping[str, torch.nn.Parameter | torch.Tensor]) -> SplitModel:
        """The same model with other tensors; nothing is sent, and no process group made."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RunError(
            "A parallelized module belongs to the processes of its mesh and cannot be pickled.",
            "Store its weights: shardwright.runtime.checkpoint.save_checkpoint(), or its state_dict() with "
            "torch.distributed.checkpoint.",
        )

    def _part(self, path: str, original: torch.nn.Module | None = None) -> torch.nn.Module:
        owner: torch.nn.Module = self
        names = path.split(".")
        for depth, name in enumerate(names, 1):
            if name not in owner._modules:
                owner._modules[name] = Submodule(".".join(names[:depth]), original if depth == len(names) else None)
                if isinstance(original, Submodule):
                    owner._modules[name].__dict__["_original"] = original.__dict__["_original"]
            owner = owner._modules[name]  # type: ignore[assignment]  # never None
        return owner

    def _own(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Buffer],
        tensors: Mapping[str, torch.nn.Parameter | torch.Tensor],
    ) -> None:
        """Register everything under its original path, tied weights under all of theirs."""
        self._paths: dict[str, str] = {}
        self._home: dict[str, tuple[dict[str, Any], str]] = {}
        for parameter in parameters:
            for path in parameter.paths:
                owner, leaf = self._owner(path)
                owner.register_parameter(leaf, tensors[parameter.tensor])  # type: ignore[arg-type]  # by its key
            self._paths[parameter.tensor] = parameter.paths[0]
            self._home[parameter.tensor] = (owner._parameters, leaf)
        for buffer in buffers:
            owner, leaf = self._owner(buffer.path)
            owner.register_buffer(leaf, tensors[buffer.tensor], persistent=buffer.persistent)
            self._paths[buffer.tensor] = buffer.path
            self._home[buffer.tensor] = (owner._buffers, leaf)

    def _owner(self, path: str) -> tuple[torch.nn.Module, str]:
        parent, _, leaf = path.rpartition(".")
        return self._part(parent) if parent else self, leaf


def names_elsewhere(model: torch.nn.Module) -> frozenset[str]:
    """The parameters and buffers of a model that stages of other ranks hold, by the names they have there."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, SplitModel):
            graph: Graph = vars(module)["_graph"]
            paths = [path for p in graph.parameters for path in p.paths] + [buffer.path for buffer in graph.buffers]
            names.update(f"{prefix}.{path}" if prefix else path for path in paths)
    return frozenset(names - {*model.state_dict()})


def as_part(value: Any, own: Any) -> Any:
    """A whole tensor as this rank's part, where the tensor it belongs to is one of parts."""
    whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return cut_like(value, own) if whole and isinstance(own, DTensor) and value.shape == own.shape else value


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
