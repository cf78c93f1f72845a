"""How a view lies in a parameter that is freed and gathered again, so that the same view of the new copy can be had.

A view may read the parameter's bytes as another dtype (``view_as_complex``) and may be marked as conjugate or negative
(``conj``, ``imag`` of one): PyTorch does neither until somebody looks at the values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """Where the elements of a view are in the storage of what it is a view of.

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
