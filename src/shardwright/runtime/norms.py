"""Norms of a pipeline's gradients are norms over all stages, also those that PyTorch's own clipping computes.

``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` take the norm of every gradient, stack these and take the norm of
the stack. The gradients of a pipeline know that others lie on other ranks: the norm of one is a :class:`Norms`, a stack of
them too, and the norm of a stack is put together from what all ranks have in theirs. A part of a tensor counts once, a copy
is divided by the number of ranks that hold it, and every rank adds up the same numbers in the same order.
"""

from __future__ import annotations

import functools
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import (
    foreach_norm,
    foreach_scale,
    like_dtensor,
    local_of,
    without_torch_function,
    wrapper_tensor,
)
from shardwright.errors import RunError
from shardwright.runtime.deferred_results import Whole
from shardwright.runtime.handshake import NORM, Handshake, kind
from shardwright.runtime.shards import whole
from shardwright.runtime.uneven import Uneven

_OURS = (f"{Path(__file__).resolve().parents[1]}/", f"{Path(torch.__file__).parent}/")
_NORMS: dict[Any, str] = {
    foreach_norm: "ord",
    torch.linalg.vector_norm: "ord",
    torch.linalg.norm: "ord",
    torch.norm: "p",
    Tensor.norm: "p",
}
"""What takes norms, and what each calls their order."""
_SCALES = frozenset([Tensor.mul_, foreach_scale])
"""What clipping scales gradients with."""
_pipelines = count()


@dataclass(frozen=True, eq=False)
class AllStages:
    """The ranks whose gradients together are those of one model; ``idle`` are those that have none to bring."""

    handshake: Handshake
    idle: tuple[int, ...]
    number: int = field(default_factory=lambda: next(_pipelines))
    """Every rank makes these for the same models in the same order, and so they have the same numbers."""

    def told(self, mine: Tensor, order: float) -> Tensor:
        """The numbers of all ranks; each brings one of float64."""
        site = zlib.crc32(f"{order} {_caller()}".encode())
        return self.handshake.tell(kind(NORM, site), {1: mine.view(torch.int64)})[:, 1].view(torch.float64)


@dataclass(frozen=True, eq=False)
class _One:
    """The norm of one gradient: that of this rank's part, as a number without dims, and the precision asked for."""

    part: Tensor
    gradient: StageGradient
    order: float
    dtype: torch.dtype

    def whole(self) -> Tensor:
        """The norm of the gradient itself; every rank of its stage calls this."""
        found, mesh = _raised(self.part.to(torch.float64), self.order), self.gradient.device_mesh
        for axis, placement in enumerate(self.gradient.placements):
            if placement.is_shard():
                every = [torch.empty_like(found) for _ in range(mesh.size(axis))]
                dist.all_gather(every, found, group=mesh.get_group(axis))
                found = _together(torch.stack(every), self.order)
        return _root(found, self.order).to(self.dtype)

    @property
    def holders(self) -> int:
        """How many ranks hold the same part of this gradient."""
        mesh = self.gradient.device_mesh
        within = (mesh.size(axis) for axis, p in enumerate(self.gradient.placements) if not p.is_shard())
        return self.gradient.copies * math.prod(within)


class Norms(Whole):
    """Norms of gradients of pipelines: one, or a stack of them. Looked at, they are plain numbers."""

    _ones: tuple[_One | Tensor, ...]

    @staticmethod
    def __new__(cls, ones: Sequence[_One | Tensor], stacked: bool) -> Norms:
        device = next(one.part.device for one in ones if isinstance(one, _One))
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in ones))
        made = wrapper_tensor(cls, (len(ones),) if stacked else (), torch.empty(0, dtype=dtype, device=device))
        made._ones, made._gathered = tuple(ones), None
        return made

    def whole(self) -> Tensor:
        if self._gathered is None:
            found = [one.whole() if isinstance(one, _One) else one for one in self._ones]
            self._gathered = torch.stack([x.to(self.dtype) for x in found]) if self.ndim else found[0]
        return self._gathered

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.stack and len(args) == 1 and not kwargs and all(x.ndim == 0 for x in args[0]):
            ones = [x._ones[0] if isinstance(x, Norms) else whole(x) for x in args[0]]
            return Norms(ones, stacked=True)
        if func is Tensor.to and args[1:] == (args[0].device,) and not kwargs:
            return args[0]
        if func in _NORMS and isinstance(args[0], Norms) and args[0].ndim:
            asked = _asked(func, args, kwargs)
            if asked is not None:
                return _norm_of_all(args[0]._ones, asked[0]).to(asked[1] or args[0].dtype)
        with without_torch_function():
            return func(*args, **kwargs)


class StageGradient(DTensor):
    """A gradient of a parameter of one stage; ``copies``: how many stages hold the parameter."""

    stages: AllStages
    copies: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS:
            asked = _asked(func, args, kwargs)
            if asked is not None:
                given = list(args[0]) if func is foreach_norm else [args[0]]
                norms = [_norm(x, *asked) for x in given]
                return tuple(norms) if func is foreach_norm else norms[0]
        elif func in _SCALES and len(args) == 2 and not kwargs and getattr(args[1], "ndim", 0) == 0:
            return _scaled(func, *args)
        made = super().__torch_function__(func, types, args, kwargs)
        if type(made) in _KINDS:
            _inherit([made], [[x] for x in args])
        elif type(made) in (list, tuple):
            _inherit(made, [x for x in args if isinstance(x, list | tuple)])
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = memo[id(self)] = self.detach().clone()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Stored, it is a tensor in parts like any other: other processes know nothing of these stages."""
        return like_dtensor(local_of(self), self).__reduce_ex__(protocol)


class UnevenStageGradient(StageGradient, Uneven):
    """One whose parts are the shares of a mesh axis."""


_KINDS: dict[type, type] = {DTensor: StageGradient, Uneven: UnevenStageGradient}


def belongs_to(gradient: Tensor, stages: AllStages, copies: int) -> None:
    """From now on a gradient knows that others lie on other ranks."""
    kind_of = _KINDS.get(type(gradient))
    if kind_of is not None:
        gradient.__class__ = kind_of
    elif not isinstance(gradient, StageGradient):
        return
    gradient.stages, gradient.copies = stages, copies  # type: ignore[attr-defined]  # it is one now


def _scaled(func: Any, gradients: Any, scale: Any) -> Any:
    """Gradients times one number, in place: of parts as of whole tensors, on whatever meshes they lie."""
    several = isinstance(gradients, list | tuple)
    func([local_of(x) for x in gradients] if several else local_of(gradients), local_of(whole(scale)))
    return None if several else gradients


def stages_of(model: torch.nn.Module) -> list[AllStages]:
    """The pipelines in a model, whatever they are wrapped in."""
    return [found for module in model.modules() if (found := vars(module).get("_all_stages")) is not None]


def _inherit(made: Sequence[Any], arguments: Sequence[Sequence[Any]]) -> None:
    """What an operator makes of gradients, element by element, are gradients of the same parameters."""
    for number, new in enumerate(made):
        if type(new) not in _KINDS or any(new is x for argument in arguments for x in argument):
            continue
        for source in (argument[number] for argument in arguments if number < len(argument)):
            if isinstance(source, StageGradient) and new.shape == source.shape:
                belongs_to(new, source.stages, source.copies)


def norm_of_all(gradients: Sequence[Tensor], stages: Iterable[AllStages], order: float) -> Tensor:
    """The norm of all gradients of these pipelines, and of others that every rank has; every rank of the pipelines calls
    this, also one that has none."""
    ones = [_norm(x, order, None) for x in gradients]
    return _norm_of_all([one._ones[0] if isinstance(one, Norms) else one for one in ones], order, stages)


def _norm(tensor: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    """The norm of one tensor; that of a gradient of a pipeline is a part of something larger."""
    if not isinstance(tensor, StageGradient):
        return whole(torch.linalg.vector_norm(tensor, order, dtype=dtype))
    local, wanted = local_of(tensor).detach(), dtype or tensor.dtype
    precise = torch.promote_types(
        wanted, torch.float32
    )  # the parts of a tensor are rounded together, as on one process
    if local.numel():
        part = torch.linalg.vector_norm(local, order, dtype=precise)
    else:  # of no numbers there is no largest
        part = torch.full((), _nothing(order), dtype=precise, device=local.device)
    return Norms([_One(part, tensor, order, wanted)], stacked=False)


def _norm_of_all(ones: Sequence[_One | Tensor], order: float, stages: Iterable[AllStages] | None = None) -> Tensor:
    """In float64: what all ranks of all pipelines bring, and what every rank has anyway."""
    found: dict[AllStages, list[_One]] = {each: [] for each in stages or ()}
    for one in ones:
        if isinstance(one, _One):
            found.setdefault(one.gradient.stages, []).append(one)
    for each in found if stages is None else ():
        if each.idle:
            raise RunError(
                f"Of this pipeline rank {', '.join(map(str, each.idle))} holds nothing that is trained, and would not take "
                "part in a norm over all stages.",
                "Call shardwright.runtime.clipping.clip_gradients(model, max_norm) on every rank.",
            )
    others = [one.to(torch.float64) for one in ones if not isinstance(one, _One)]
    numbers = [_together(_counted(torch.stack(others), order), order)] if others else []
    for each in sorted(found, key=lambda each: each.number):
        numbers.append(_together(each.told(_brought(found[each], order, each.handshake.device), order), order))
    return _root(_together(torch.stack(numbers), order), order) if numbers else torch.zeros((), dtype=torch.float64)


def _brought(ones: Sequence[_One], order: float, device: torch.device) -> Tensor:
    """What this rank adds to the norm of all gradients, before the root is taken."""
    if not ones:
        return torch.full((), _nothing(order), dtype=torch.float64, device=device)
    in_parts = order != 0 and all(one.order == order for one in ones)  # else a norm of norms, which are needed whole
    norms = torch.stack([one.part if in_parts else one.whole() for one in ones]).to(torch.float64)
    if math.isinf(order):
        return _together(norms, order)
    shared = [one.holders if in_parts else one.gradient.copies * one.gradient.device_mesh.size() for one in ones]
    return (_counted(norms, order) / torch.tensor(shared, dtype=torch.float64, device=norms.device)).sum()


def _nothing(order: float) -> float:
    """The norm of no numbers."""
    return math.inf if order == -math.inf else 0.0


def _raised(norms: Tensor, order: float) -> Tensor:
    """What is added up, of norms of parts."""
    return norms if order == 0 or math.isinf(order) else norms.pow(order)


def _counted(norms: Tensor, order: float) -> Tensor:
    """What is added up, of norms of tensors: the order 0 counts those that are not zero."""
    return (norms != 0).to(norms.dtype) if order == 0 else _raised(norms, order)


def _together(parts: Tensor, order: float) -> Tensor:
    """Powers are added, the largest or smallest number is taken; what is not a number stays so."""
    if math.isinf(order):
        return parts.amax() if order > 0 else parts.amin()
    return parts.sum()


def _root(total: Tensor, order: float) -> Tensor:
    return total if order == 0 or math.isinf(order) else total.pow(1.0 / order)


def _asked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, torch.dtype | None] | None:
    """The order and the dtype of a norm over all of a tensor; none where a function is asked for anything else."""
    name = _NORMS[func]
    about = {key: value for key, value in kwargs.items() if key not in (name, "dtype") and value not in (None, False)}
    order = args[1] if len(args) > 1 else kwargs.get(name)
    if about or len(args) > 2 or (func is torch.linalg.norm and order is not None and args[0].ndim > 1):
        return None
    if order is None or order == "fro":
        return 2.0, kwargs.get("dtype")
    return (float(order), kwargs.get("dtype")) if isinstance(order, int | float) else None


def _caller() -> str:
    """The line that wants a norm: ranks that want one on different lines want different ones."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # type: ignore[assignment]  # None ends it
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
