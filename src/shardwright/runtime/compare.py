"""Two training runs side by side: losses, gradients, parameters, buffers, and how far each pair may differ.

Sums are taken in another order on several devices, so numbers differ by rounding: a tensor agrees when its largest
difference is within :class:`Tolerance` of its largest value. A parameter may also differ by what its gradient's tolerance
explains, because AdamW divides by the gradient's size and so turns rounding noise on a gradient that is zero in theory
(the bias of an attention's keys) into steps of the learning rate.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import flatten_tree

LEARNING_RATE = 1e-3
EPSILON = 1e-8
WOBBLES = 16.0


@dataclass(frozen=True)
class Tolerance:
    """``relative`` to a tensor's largest value; ``noise`` relative to the largest gradient of the model."""

    relative: float
    noise: float

    @staticmethod
    def of(dtype: torch.dtype) -> Tolerance:
        return Tolerance(1e-9, 1e-12) if dtype == torch.float64 else Tolerance(2e-4, 2e-6)


@dataclass(frozen=True)
class Comparison:
    """One compared tensor: its worst difference, the size it is measured by, what was allowed.

    A gradient is measured by its own largest value plus the noise floor of the model's largest gradient, a
    parameter by its own plus one step of the learning rate.
    """

    what: str
    name: str
    difference: float
    size: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed

    @property
    def relative(self) -> float:
        return self.difference / self.size if self.size else self.difference


@dataclass(frozen=True)
class Verification:
    """Everything compared. ``communication`` counts what was sent: per kind, steps and bytes of one training step."""

    comparisons: tuple[Comparison, ...]
    losses: tuple[float, ...]
    dtype: str
    communication: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        return bool(self.comparisons) and all(item.agrees for item in self.comparisons)

    def worst(self, what: str) -> Comparison | None:
        """The comparison of a kind (``loss``, ``gradient``, ``parameter``, ``buffer``) that comes closest to its limit."""
        of_kind = [item for item in self.comparisons if item.what == what]
        return max(of_kind, key=lambda item: item.difference / (item.allowed or 1e-300), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "agrees": self.agrees,
            "dtype": self.dtype,
            "losses": list(self.losses),
            "compared": len(self.comparisons),
            "worst": {
                what: asdict(worst)
                for what in ("loss", "gradient", "parameter", "buffer")
                if (worst := self.worst(what)) is not None
            },
            "disagreeing": [asdict(item) for item in self.comparisons if not item.agrees],
            "communication": {kind: list(amount) for kind, amount in self.communication.items()},
        }


@dataclass
class Run:
    """What a training run leaves behind, whole tensors by their names in the model."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def train(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int, keep: bool) -> Run:
    """Train with AdamW and keep what is to be compared (``keep`` is false on ranks that only take part)."""
    run = Run()
    optimiser = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.01
    )
    for _ in range(steps):
        optimiser.zero_grad()
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        run.losses.append(float(_whole(loss.detach())))
        gradients = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        run.gradients.append(gradients if keep else {})
        optimiser.step()
    parameters = {name: _whole(p.detach()) for name, p in model.named_parameters()}
    buffers = {name: _whole(b) for name, b in model.named_buffers()}
    if keep:
        run.parameters, run.buffers = parameters, buffers
    return run


def loss_of(output: Any) -> Tensor:
    """The scalar to train on: the output itself, its ``loss``, or else the mean square of everything it holds."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    leaves = [leaf for leaf in flatten_tree(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    wholes = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    return torch.stack([whole.pow(2).mean() for whole in wholes if whole.requires_grad]).sum()


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model whose parameters differ from it by about one rounding each."""
    other = copy.deepcopy(model)
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=dice).to(parameter)
            parameter.mul_(1 + noise * torch.finfo(parameter.dtype).eps)
    return other


def compare(reference: Run, other: Run, tolerance: Tolerance, wobble: Run | None = None) -> list[Comparison]:
    """Every loss, gradient, parameter and buffer of two runs; what only one of them has disagrees.

    ``wobble`` is the reference again from weights that differ by one rounding: what it differs by, a model does to
    rounding by itself (batch norm over few values is such a model), and sixteen times that is allowed in addition.
    """
    found = _compared(reference, other, tolerance)
    if wobble is None:
        return found
    natural = {(item.what, item.name): item.difference for item in _compared(reference, wobble, tolerance)}
    return [replace(item, allowed=item.allowed + WOBBLES * natural.get((item.what, item.name), 0.0)) for item in found]


def _compared(reference: Run, other: Run, tolerance: Tolerance) -> list[Comparison]:
    found = []
    for step, (loss, other_loss) in enumerate(zip(reference.losses, other.losses, strict=True), 1):
        allowed = tolerance.relative * max(abs(loss), 1e-3)
        found.append(Comparison("loss", f"step {step}", abs(loss - other_loss), abs(loss), allowed))
    slack: dict[str, Tensor] = {}
    for step, (mine, theirs) in enumerate(zip(reference.gradients, other.gradients, strict=True), 1):
        largest = max((_size(gradient) for gradient in mine.values()), default=0.0)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs:
                found.append(Comparison("gradient", f"{name} at step {step}", float("inf"), 0.0, 0.0))
                continue
            scale = _size(mine[name]) + tolerance.noise / tolerance.relative * largest
            allowed = tolerance.relative * scale
            found.append(_tensors("gradient", f"{name} at step {step}", mine[name], theirs[name], allowed, scale=scale))
            explained = (3 * allowed / (mine[name].abs() + EPSILON)).clamp(max=2.0) * LEARNING_RATE
            slack[name] = slack.get(name, torch.zeros_like(explained)) + explained
    for name in sorted(reference.parameters.keys() | other.parameters.keys()):
        parameter = reference.parameters.get(name)
        allowed, scale = tolerance.relative * _size(parameter), _size(parameter) + LEARNING_RATE
        theirs_too = other.parameters.get(name)
        found.append(_tensors("parameter", name, parameter, theirs_too, allowed, slack.get(name), scale))
    for name in sorted(reference.buffers.keys() | other.buffers.keys()):
        buffer = reference.buffers.get(name)
        allowed = tolerance.relative * max(_size(buffer), 1e-3)
        found.append(_tensors("buffer", name, buffer, other.buffers.get(name), allowed))
    return found


def _size(tensor: Tensor | None) -> float:
    return float(tensor.abs().max()) if tensor is not None and tensor.numel() else 0.0


def _tensors(
    what: str,
    name: str,
    mine: Tensor | None,
    theirs: Tensor | None,
    allowed: float,
    slack: Tensor | None = None,
    scale: float | None = None,
) -> Comparison:
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return Comparison(what, name, float("inf"), 0.0, 0.0)
    if not mine.numel():
        return Comparison(what, name, 0.0, 0.0, allowed)
    exact = mine.to(torch.complex128 if mine.is_complex() else torch.float64)
    difference = (exact - theirs.to(exact.dtype)).abs()
    if not bool(torch.isfinite(difference).all()):
        same = torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs)) if mine.is_floating_point() else False
        return Comparison(what, name, 0.0 if same else float("inf"), _size(mine), allowed)
    limits = torch.full_like(difference, allowed) if slack is None else allowed + slack.to(difference.dtype)
    worst = int((difference - limits).argmax())
    size = _size(mine) if scale is None else scale
    return Comparison(what, name, float(difference.flatten()[worst]), size, float(limits.flatten()[worst]))
