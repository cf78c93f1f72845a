"""Whose numbers are these? Every number of the model is given another value, and parts of weights are known by their values.

Foreign code cuts weights in ways that it does not declare: rows of a fused projection per head, transposed, flattened into
one buffer with padding, under names of its own. Before ``build`` is called, all parameters are therefore made to hold
distinct numbers (what is constant, like biases of zero and norms of one, is spread around its value; of other weights only
those that occur twice move, by one millionth). From then on the position of every element in the model is found by looking
its value up: exactly, in float64, as cutting and copying do no arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

SPREAD = 0.1
"""By how much parameters that hold one value are spread: enough for a mistake about a bias of zero to be seen."""
TINY = 1e-6
NOBODY = -1
"""The place of padding and of numbers that the model does not have."""

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]


def distinct(model: nn.Module) -> nn.Module:
    """The model in float64 with no number twice among its parameters."""
    dice = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            numbers = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            noise = torch.randn(numbers.shape, generator=dice, dtype=torch.float64)
            constant = numbers.numel() > 1 and bool((numbers == numbers.flatten()[0]).all())
            size = float(numbers.double().abs().mean()) if numbers.numel() else 0.0
            numbers.add_(noise * (SPREAD if constant else TINY * (size or 1.0)))
    return model


class Model:
    """The numbers of a model in one row, parameter after parameter, and where each value stands in it."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        sizes = [tensor.numel() for tensor in parameters.values()]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        self.spans = {n: slice(int(a), int(b)) for n, a, b in zip(parameters, starts, starts[1:], strict=False)}
        self.size = int(starts[-1])
        self.numbers = self.row({name: flat(tensor) for name, tensor in parameters.items()})
        self._order = np.argsort(self.numbers, kind="stable")
        self._sorted = self.numbers[self._order]

    def row(self, parts: Mapping[str, Numbers]) -> Numbers:
        """Numbers by parameter in one row; what is missing is not a number."""
        row = np.full(self.size, np.nan)
        for name, part in parts.items():
            row[self.spans[name]] = part
        return row

    def parts(self, row: Numbers) -> dict[str, Tensor]:
        """The parameters in a row, those left out of which there is nothing."""
        cut = {name: row[span].reshape(self.shapes[name]) for name, span in self.spans.items()}
        return {
            name: torch.from_numpy(part.copy())
            for name, part in cut.items()
            if not np.isnan(part).all() or not part.size
        }

    def places(self, numbers: Numbers) -> Places:
        """Where in the row each number stands."""
        found = np.searchsorted(self._sorted, numbers).clip(max=max(self.size - 1, 0))
        return np.where(self._sorted[found] == numbers, self._order[found], NOBODY)

    def names(self, places: Places) -> list[str]:
        """The parameters that these places belong to."""
        held = np.unique(places[places != NOBODY])
        return [name for name, span in self.spans.items() if bool(((held >= span.start) & (held < span.stop)).any())]


def flat(tensor: Tensor) -> Numbers:
    """All numbers of a tensor in float64, in one row."""
    return tensor.detach().to(torch.float64).contiguous().view(-1).numpy().copy()
