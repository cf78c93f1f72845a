"""Follows storages from birth to death while PyTorch runs, on real tensors or on meta tensors.

A dispatch mode sees every result of every operator, also inside autograd; a weak reference to its storage tells when it is
freed. Under a dispatch mode autograd never adds gradients in place, which callers have to keep in mind.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright._torch_compat import DispatchMode


class StorageWatch(DispatchMode):
    """``alive`` maps the address of every storage seen to its number and its bytes; numbers are never used twice.

    ``peak`` is the most bytes alive since it was last reset, ``at_peak`` the numbers and bytes of what was alive then.
    ``kernels`` counts the operators that made a storage or wrote into one, ``views`` the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, int]] = {}
        self.count = self.now = self.peak = self.kernels = self.views = 0
        self.at_peak: dict[int, int] = {}
        self._known: frozenset[int] = frozenset()
        self._watched: list[weakref.ref] = []

    @contextmanager
    def watching(self, known: Iterator[int] | set[int]) -> Iterator[None]:
        """Watch what runs inside; storages at the ``known`` addresses are somebody else's."""
        self._known = frozenset(known)
        self.reset()
        with self:
            yield

    def reset(self) -> None:
        """Forget the peak."""
        self.peak, self.at_peak = self.now, dict(self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, before = func(*args, **(kwargs or {})), self.count
        for value in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(value, torch.Tensor):
                self.see(value)
        computes = self.count > before or func._schema.is_mutable
        self.kernels += computes
        self.views += not computes
        return made

    def see(self, tensor: torch.Tensor) -> None:
        """Follow the storage of a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive or key in self._known:
            return
        size = storage.nbytes()
        self.alive[key] = (self.count, size)
        self.count += 1
        self.now += size
        if self.now > self.peak:
            self.reset()

        def died(_: Any) -> None:
            self.now -= self.alive.pop(key, (0, 0))[1]

        self._watched.append(weakref.ref(storage, died))


def address(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor apart while it lives."""
    return tensor.untyped_storage()._cdata
