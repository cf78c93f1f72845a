"""What instructions that compute do to the values of a pass, each as a small value that can be called.

An action reads slots and writes slots, and nothing else happens in it: a run of them can be traced into one function and
compiled (:mod:`~shardwright.runtime.regions`). ``alike`` is what two actions have in common that do the same to other slots,
which is how equal blocks are recognised; ``None`` where an action cannot be part of a compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright._torch_compat import owns_storage
from shardwright.lowering.derivatives import Lazy
from shardwright.lowering.tracing import Traced

Slots = tuple[int, ...]
Places = tuple[tuple[int, int], ...]
"""Slots, and which of several results goes there."""


class View(NamedTuple):
    """Where the elements of a view are in the storage of what it is a view of: a parameter that is freed and gathered again,
    of whose new copy the same view is wanted.

    It may read the parameter's bytes as another dtype (``view_as_complex``) and may be marked as conjugate or negative
    (``conj``, ``imag`` of one): PyTorch does neither until somebody looks at the values.

    >>> parameter = torch.arange(6.0).view(3, 2)
    >>> seen = torch.view_as_complex(parameter)[1:].conj()
    >>> View.of(seen).on(parameter.clone())
    tensor([2.-3.j, 4.-5.j])
    """

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @staticmethod
    def of(view: Tensor) -> View:
        offset = int(view.storage_offset())
        return View(view.dtype, view.shape, view.stride(), offset, view.is_conj(), view.is_neg())

    def on(self, whole: Tensor) -> Tensor:
        """The same view of another copy."""
        if self.dtype == whole.dtype:
            found = whole.as_strided(self.shape, self.strides, self.offset)
        else:
            found = whole.new_empty(0, dtype=self.dtype)
            found.set_(whole.untyped_storage(), self.offset, self.shape, self.strides)
        found = found.conj() if self.conjugate else found
        return -found if self.negative else found


class PassState:
    """One pass under way: its values, and the states of random generators that a block computed again starts from.

    ``tracing``: the pass only serves to write down what is done, and nothing in it may be changed in place.
    """

    def __init__(self, slots: list[Any], tracing: bool = False) -> None:
        self.slots, self.tracing = slots, tracing
        self.random: dict[int, tuple[Tensor, ...]] = {}
        self.lies: dict[tuple[int, int], View] = {}
        """How views of parameters that are freed and gathered again lie in them, by the values that need them."""
        self.found: dict[int, Tensor | None] = {}
        """The gradients of the inputs, by their values, once they are known."""
        self.spent = False


Action = Callable[[PassState], None]


@dataclass(frozen=True, eq=False, slots=True)
class Plain:
    """An operator that nothing goes back through."""

    call: Callable[..., tuple[Any, ...]]
    like: Hashable
    """What is the same in operators that call alike; ``None`` where that is not known."""
    reads: Slots
    writes: Places

    def __call__(self, run: PassState) -> None:
        slots = run.slots
        made = self.call(*[slots[r] for r in self.reads])
        for slot, place in self.writes:
            slots[slot] = made[place]

    @property
    def alike(self) -> Hashable:
        return None if self.like is None else ("plain", self.like, tuple(place for _, place in self.writes))


@dataclass(frozen=True, eq=False, slots=True)
class Forward:
    """An operator that leaves in ``saved`` what its backward needs. ``views``: the inputs whose lie is noted; ``begun``: its
    early part has been done and lies in ``saved``."""

    found: Lazy
    reads: Slots
    writes: Places
    saved: int
    views: tuple[int, ...]
    begun: bool = False

    def __call__(self, run: PassState) -> None:
        slots = run.slots
        begun = slots[self.saved] if self.begun else None
        made, slots[self.saved] = self.found.forward([slots[r] for r in self.reads], begun)
        for slot, place in self.writes:
            slots[slot] = made[place]
        for place in self.views:
            run.lies[self.saved, place] = View.of(slots[self.reads[place]])

    @property
    def several(self) -> bool:
        """Whether it is worth compiling by itself."""
        return isinstance(self.found.way, Traced) and self.found.way.several

    @property
    def alike(self) -> Hashable:
        return ("forward", self.found.way, tuple(place for _, place in self.writes)) if self.found.traced else None


@dataclass(frozen=True, eq=False, slots=True)
class Early:
    """What an operator draws and exchanges, by itself: it need not wait for the values that the operator computes with."""

    way: Traced
    given: Slots
    saved: int
    alike = None

    def __call__(self, run: PassState) -> None:
        run.slots[self.saved] = self.way.early([run.slots[r] for r in self.given])

    @staticmethod
    def parted(act: Action) -> tuple[Early, Forward] | None:
        """An operator in its early part and the rest, where it has one."""
        way = act.found.early if isinstance(act, Forward) else None
        if way is None or not isinstance(act, Forward):
            return None
        given = tuple(act.reads[i] for i in way.early_inputs or ())
        return Early(way, given, act.saved), replace(act, begun=True)


@dataclass(frozen=True, eq=False, slots=True)
class Backward:
    """The gradients of some inputs of an operator, from those of its results and from what was kept of both."""

    found: Lazy
    arrived: tuple[int | None, ...]
    kept: tuple[int | None, ...]
    saved: int | None
    places: tuple[int, ...]
    writes: Slots
    views: tuple[int, ...]
    last: bool
    idle: Callable[[], bool]
    """Whether nobody wants these gradients now: the parameters are frozen."""

    def __call__(self, run: PassState) -> None:
        slots = run.slots
        gradients = [None if g is None else slots[g] for g in self.arrived]
        if all(g is None for g in gradients) or self.idle():
            return
        kept = [None if s is None else slots[s] for s in self.kept]
        for place in self.views:  # what is there again is the parameter, of which the operator read a view
            there: Any = kept[place]
            kept[place] = run.lies[self.saved or 0, place].on(there)
        own = slots[self.saved] if self.saved is not None else None
        found = self.found.backward(own, kept, gradients, self.places, self.last)
        for slot, gradient in zip(self.writes, found, strict=True):
            slots[slot] = gradient

    @property
    def several(self) -> bool:
        """Whether it is worth compiling by itself."""
        return isinstance(self.found.way, Traced) and self.found.way.several

    @property
    def numbers(self) -> set[int]:
        """The slots whose numbers it reads: of others it only asks how large they are."""
        way, known = self.found.way, {slot for slot in (*self.arrived, self.saved) if slot is not None}
        places = way.reads(self.places) if isinstance(way, Traced) else range(len(self.kept))
        return known | {slot for place in places if (slot := self.kept[place]) is not None}

    @property
    def alike(self) -> Hashable:
        if not self.found.traced or self.saved is None or self.views:
            return None
        shape = tuple(g is None for g in self.arrived), tuple(s is None for s in self.kept)
        return "backward", self.found.way, self.places, self.last, shape

    @property
    def reads(self) -> Slots:
        return tuple(slot for slot in (*self.arrived, *self.kept, self.saved) if slot is not None)


@dataclass(frozen=True, eq=False, slots=True)
class Accumulate:
    """Two gradients of one value added up, in place where the first is nobody else's."""

    one: int
    other: int
    result: int
    may_add: bool

    def __call__(self, run: PassState) -> None:
        slots = run.slots
        a, b = slots[self.one], slots[self.other]
        if a is None or b is None:
            slots[self.result] = b if a is None else a
        elif self.may_add and not run.tracing and a.dtype == b.dtype and owns_storage(a):
            slots[self.result] = a.add_(b)
        else:
            slots[self.result] = a + b

    @property
    def alike(self) -> Hashable:
        return ("accumulate",)

    @property
    def reads(self) -> Slots:
        return self.one, self.other
