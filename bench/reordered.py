"""How far one process is from itself: a model trained eagerly in float64, its sums added up in other orders.

    python bench/reordered.py hf:mobilenet_v2:small [--batch 2]

All runs compute the same mathematics on one process without any code of Shardwright's runtime, and differ in rounding alone:
the batch in another order; batch norms from sums over halves of the batch and over halves of the images, as a cut batch norm
is computed; convolutions by PyTorch's own loops instead of its library; the weights moved by one rounding. What they
differ by is what no split can be held to. ``relative`` is what ``shardwright verify`` compares with 1e-9: the difference of
a gradient over its largest value and a thousandth of the model's largest gradient. ``same start`` computes the second step's
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
STEPS = 2


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
            p.mul_(1 + torch.finfo(p.dtype).eps * (torch.randint(0, 2, p.shape, generator=draw) - 0.5).sign())
    return model, dict(kwargs)


def as_it_is(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return model, dict(kwargs)


Change = Callable[[nn.Module, Mapping[str, Any]], tuple[nn.Module, dict[str, Any]]]
VARIANTS: dict[str, tuple[Change, Callable[[], Any]]] = {
    "again": (as_it_is, nullcontext),
    "the batch in another order": (reversed_rows, nullcontext),
    "batch norms from halves of the batch": (as_it_is, lambda: in_halves(0)),
    "batch norms from halves of the images": (as_it_is, lambda: in_halves(2)),
    "convolutions by PyTorch's own loops": (as_it_is, lambda: torch.backends.mkldnn.flags(enabled=False)),
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
    print(f"{asked.reference}, batch {asked.batch}: largest gradient {sizes[0]:.3g}, then {sizes[1]:.3g}; {noise} of")
    print(f"{len(plain[0])} parameters have gradients below 1e-12 at the first step: zero but for rounding\n")
    print("| | step 1, relative | step 2 | step 2, same start | worst at step 2 |\n|---|--:|--:|--:|---|")
    for name, (change, context) in VARIANTS.items():
        model, kwargs = change(copy.deepcopy(resolved.model), resolved.kwargs)
        with context():
            other, _ = trained(model, kwargs)
            model.load_state_dict({**model.state_dict(), **starts[1]})
            same = relative(plain[1], gradients(model, kwargs))[0]
        (first, _), (second, where) = relative(plain[0], other[0]), relative(plain[1], other[1])
        print(f"| {name} | {first:.1e} | {second:.1e} | {same:.1e} | {where} |")


if __name__ == "__main__":
    main()
