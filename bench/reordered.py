"""How far one process is from itself: a model trained eagerly in float64, its sums added up in other orders.

    python bench/reordered.py hf:mobilenet_v2:small [--batch 2]

All runs compute the same mathematics on one process without any code of Shardwright's runtime, and differ in rounding alone:
the batch in another order; batch norms from sums over halves of the batch and over halves of the images, as a cut batch norm
is computed; images with channels last; the weights moved by one rounding. What they
differ by is what no split can be held to. ``relative`` is what ``shardwright verify`` compares with 1e-9: the difference of
a gradient over its largest value and a thousandth of the model's largest gradient. ``same start`` computes the last step's
gradients at the parameters of the run it is compared with, so that AdamW's division of noise by itself drops out.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardwright.zoo.reference import resolve

Tensors = Mapping[str, Tensor]
STEPS = 3


def gradients(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The gradients of one step, left on the parameters too."""
    model.zero_grad()
    model(**kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trained(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[list[Tensors], list[Tensors]]:
    """Gradients of every step, and the parameters before each and after the last."""
    optimizer, found, before = torch.optim.AdamW(model.parameters(), lr=1e-3), list[Tensors](), [_parameters(model)]
    for _ in range(STEPS):
        found.append(gradients(model, kwargs))
        optimizer.step()
        before.append(_parameters(model))
    return found, before


def _parameters(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def relative(one: Tensors, other: Tensors) -> tuple[float, str]:
    """The largest difference in the measure of ``verify``, and the parameter it belongs to."""
    largest = max(float(g.abs().max()) for g in one.values())
    return max((float((one[n] - other[n]).abs().max()) / (float(one[n].abs().max()) + 1e-3 * largest), n) for n in one)


@contextmanager
def in_halves(dim: int) -> Iterator[None]:
    """Batch norms in training whose statistics are sums over two halves along a dim, added up afterwards."""

    def forward(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
        parts = x.chunk(2, dim)
        count = x.numel() // x.shape[1]
        total = sum(part.sum((0, 2, 3)) for part in parts)
        mean = (total / count)[None, :, None, None]
        square = sum((part - mean).square().sum((0, 2, 3)) for part in parts)
        scale = torch.rsqrt(square / count + self.eps) * self.weight
        return torch.cat([(part - mean) * scale[None, :, None, None] for part in parts], dim) + self.bias[:, None, None]

    with mock.patch.object(nn.BatchNorm2d, "forward", forward):
        yield


def reversed_rows(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return model, {name: v.flip(0) if torch.is_tensor(v) and v.dim() else v for name, v in kwargs.items()}


def one_rounding_away(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            up = torch.randint(0, 2, p.shape, generator=draw, dtype=p.dtype)
            p.copy_(torch.nextafter(p, torch.where(up > 0, torch.inf, -torch.inf).to(p.dtype)))
    return model, dict(kwargs)


def channels_last(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    changed = {
        name: v.contiguous(memory_format=torch.channels_last) if torch.is_tensor(v) and v.dim() == 4 else v
        for name, v in kwargs.items()
    }
    return model.to(memory_format=torch.channels_last), changed


def as_it_is(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return model, dict(kwargs)


Change = Callable[[nn.Module, Mapping[str, Any]], tuple[nn.Module, dict[str, Any]]]
VARIANTS: dict[str, tuple[Change, Callable[[], Any]]] = {
    "again": (as_it_is, nullcontext),
    "the batch in another order": (reversed_rows, nullcontext),
    "batch norms from halves of the batch": (as_it_is, lambda: in_halves(0)),
    "batch norms from halves of the images": (as_it_is, lambda: in_halves(2)),
    "channels last": (channels_last, nullcontext),
    "every weight one rounding away": (one_rounding_away, nullcontext),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", nargs="?", default="hf:mobilenet_v2:small")
    parser.add_argument("--batch", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    resolved = resolve(asked.reference, batch=asked.batch, device="cpu", dtype="float64")
    plain, starts = trained(copy.deepcopy(resolved.model), resolved.kwargs)
    sizes = [max(float(g.abs().max()) for g in step.values()) for step in plain]
    noise = sum(float(g.abs().max()) < 1e-12 for g in plain[0].values())
    largest = ", ".join(f"{size:.3g}" for size in sizes)
    print(f"{asked.reference}, batch {asked.batch}: largest gradients {largest}; {noise} of {len(plain[0])}")
    print("parameters have gradients below 1e-12 at the first step: zero but for rounding\n")
    print(f"| | {' | '.join(f'step {n}' for n in range(1, STEPS + 1))} | step {STEPS}, same start | worst at the end |")
    print("|---|" + "--:|" * (STEPS + 1) + "---|")
    for name, (change, context) in VARIANTS.items():
        model, kwargs = change(copy.deepcopy(resolved.model), resolved.kwargs)
        with context():
            other, _ = trained(model, kwargs)
            model.load_state_dict({**model.state_dict(), **starts[STEPS - 1]})
            same = relative(plain[-1], gradients(model, kwargs))[0]
        apart = [relative(one, two) for one, two in zip(plain, other, strict=True)]
        print(f"| {name} | {' | '.join(f'{size:.1e}' for size, _ in apart)} | {same:.1e} | {apart[-1][1]} |")


if __name__ == "__main__":
    main()
