"""Random operators in pieces: the same pattern where a tensor is whole, independent patterns where it is cut.

An operator that every rank runs whole draws from the default generator, as on one device; the ranks' generators are in the
same state, so they draw alike. An operator that is cut draws *one* number from the default generator, which keeps the
ranks in step, and seeds the pattern of its piece with that number and the piece's place. A fixed seed therefore
reproduces a run, and ranks along axes that do not cut the operator still draw alike.

In a step that is recorded (CUDA graphs) no host draws seeds. There every place has a generator of its own, seeded once from
the same draw, which the recording advances with every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_SEEDS = 2**62
PLACES: set[int] = set()
"""Of the pieces that this process has drawn numbers for."""
_standing: Mapping[int, torch.Generator] | None = None
_STRIDE = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbouring pieces get unrelated seeds


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Where the generators are that operators on this device draw from (the host's gives seeds everywhere)."""
    return tuple(generator.get_state() for generator in _generators(device))


def set_random_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    """Go back to a state."""
    for generator, known in zip(_generators(device), state, strict=True):
        generator.set_state(known)


def _generators(device: torch.device) -> list[torch.Generator]:
    here = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *here]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a fresh pattern, then go on where the default generator was."""
    generator = _generators(device)[-1]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


@contextmanager
def drawing_for(place: int, device: torch.device) -> Iterator[None]:
    """Draw the pattern of a piece at this place."""
    PLACES.add(place)
    if _standing is None:
        with seeded(piece_seed(place), device):
            yield
        return
    default = _generators(device)[-1]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(_standing[place])
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


def standing_generators(device: torch.device) -> dict[int, torch.Generator]:
    """A generator for every place that was drawn for so far, seeded from one draw that all ranks make."""
    drawn = int(torch.randint(_SEEDS, (), generator=torch.default_generator))
    made = {place: torch.Generator(device) for place in sorted(PLACES)}
    for place, generator in made.items():
        generator.manual_seed((drawn + place * _STRIDE) % _SEEDS)
    return made


@contextmanager
def drawing_from(generators: Mapping[int, torch.Generator]) -> Iterator[None]:
    """Pieces draw from these generators, by their places."""
    global _standing
    _standing = generators
    try:
        yield
    finally:
        _standing = None


def piece_seed(place: int) -> int:
    """A seed that every rank derives from the same draw, different for every place."""
    drawn = int(torch.randint(_SEEDS, (), generator=torch.default_generator))
    return (drawn + place * _STRIDE) % _SEEDS


@torch.library.custom_op("shardwright::keep_mask", mutates_args=())
def keep_mask(shape: Sequence[int], probability: float, place: int, device: torch.device) -> Tensor:
    """Which elements a piece of a dropout keeps. It reads no tensor, so it can be drawn before its turn comes."""
    with drawing_for(place, device):
        return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(probability)


@keep_mask.register_fake
def _(shape: Sequence[int], probability: float, place: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


class Dropout(torch.nn.Module):
    """A piece of ``aten.dropout`` (or, with ``mask``, of ``aten.native_dropout``)."""

    def __init__(self, rate: float, place: int, mask: bool) -> None:
        super().__init__()
        self.rate, self.place, self.mask = rate, place, mask

    def forward(self, x: Tensor) -> Any:
        keep = keep_mask(x.shape, 1.0 - self.rate, self.place, x.device)
        scale = 0.0 if self.rate == 1.0 else 1.0 / (1.0 - self.rate)
        value = x * keep * scale
        return (value, keep) if self.mask else value


class Drawn(torch.nn.Module):
    """A piece of any other random operator, run with the generator seeded for its place."""

    def __init__(self, function: Callable[..., Any], place: int, device: torch.device) -> None:
        super().__init__()
        self.function, self.place, self.device = function, place, device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with drawing_for(self.place, self.device):
            return self.function(*args, **kwargs)
