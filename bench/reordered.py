"""How far one process is from itself: a model trained twice, eagerly, the second time with the batch in another order.

    python bench/reordered.py hf:mobilenet_v2:small

The two runs compute the same mathematics and differ in rounding alone, in float64. What they differ by after two steps of
AdamW is what no split can be held to: where a gradient is zero but for rounding (weights before a batch norm over few
values), AdamW divides the noise by itself.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from shardwright.zoo.reference import resolve


def trained(
    model: torch.nn.Module, kwargs: dict[str, Any]
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Gradients of two steps and the parameters after them."""
    optimizer, gradients = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(2):
        optimizer.zero_grad()
        model(**kwargs).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def main(reference: str) -> None:
    torch.set_num_threads(1)
    resolved = resolve(reference, batch=2, device="cpu", dtype="float64")
    rows = {name: v.flip(0) if torch.is_tensor(v) and v.dim() else v for name, v in resolved.kwargs.items()}
    first, after = trained(copy.deepcopy(resolved.model), resolved.kwargs)
    second, other = trained(copy.deepcopy(resolved.model), rows)
    for step, (a, b) in enumerate(zip(first, second, strict=True), 1):
        largest = max(float(g.abs().max()) for g in a.values())
        worst = max(a, key=lambda name: float((a[name] - b[name]).abs().max()))
        apart = float((a[worst] - b[worst]).abs().max())
        print(f"step {step}: largest gradient {largest:.3g}, difference at most {apart:.3g} ({worst})")
    noise = sum(float(g.abs().max()) < 1e-12 for g in first[0].values())
    print(f"{noise} of {len(after)} parameters have gradients below 1e-12 at the first step: zero but for rounding")
    worst = max(after, key=lambda name: float((after[name] - other[name]).abs().max()))
    print(
        f"parameters after two steps differ by at most {float((after[worst] - other[worst]).abs().max()):.3g} ({worst})"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "hf:mobilenet_v2:small")
