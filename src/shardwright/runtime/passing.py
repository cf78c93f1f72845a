"""A step of a pipeline as autograd sees it: one function of a whole batch, and the other half of
:class:`~shardwright.runtime.pipeline.PipelineModule`, whose attributes have to stay out of the way of the model's.

Where the model gives a scalar loss, the call has run the backward passes already, with a gradient of one, and going back
scales what they kept; otherwise going back runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from shardwright.errors import RunError
from shardwright.graph import Ref
from shardwright.lowering.collectives import run_steps


class Passing(torch.autograd.Function):
    """A step of the pipeline as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, module: Any, anchor: Tensor, given: Mapping[str, Tensor]) -> Any:
        ctx.module = module
        ctx.passage = module._passed(given, "forward" if module._loss is None else "whole", keep=True)
        ctx.set_materialize_grads(False)
        places = [place for place, out in enumerate(module._body.outputs) if isinstance(out, Ref)]
        results = list(module._outputs_of(ctx.passage))
        ctx.places = places
        plain = [x for x in results if not x.is_floating_point()]
        ctx.mark_non_differentiable(*plain)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        module, passage, ctx.passage = ctx.module, ctx.passage, None
        if passage is None:
            raise RunError(
                "A second backward pass goes through the same step of a pipeline.",
                "What it needs is freed by the first: add the losses up before backward(), or run the step again.",
            )
        arrived = {place: g for place, g in zip(ctx.places, gradients, strict=True) if g is not None}
        if module._loss is not None:
            others = [place for place in arrived if place != module._loss]
            if others:
                raise RunError(
                    f"A gradient arrives at output {others[0]} of a pipeline, which went back from its loss already.",
                    "Compute everything that the loss depends on inside the model, or return no scalar from it.",
                )
            scale = arrived.get(module._loss)
            if scale is not None:
                one = bool(scale == 1)
                module._hand_out(passage, None if one else scale, scaled=not one)
            return None, None, None
        passage.arriving = _parts_of(module, arrived)
        passage.perform(*module._backward_passes)
        module._hand_out(passage, None, scaled=True)
        return None, None, None


def _parts_of(module: Any, arrived: Mapping[int, Tensor]) -> Any:
    """This rank's part of the gradient of an output for one micro-batch: a gradient lies as its tensor does."""
    micro = module.pipeline.micro

    def part(place: int, microbatch: int) -> Tensor | None:
        gradient, join = arrived.get(place), micro.joins[place]
        if gradient is None:
            return None
        if isinstance(join, Shard):
            start, stop = micro.region(gradient.shape[join.dim], microbatch)
            gradient = gradient.narrow(join.dim, start, stop - start)
        elif not isinstance(join, Partial) and microbatch > 0:
            return None  # every micro-batch gives the same: one of them takes the gradient
        key = (module._made_by[place], micro.sizes[microbatch])
        name = module._body.outputs[place].name
        return run_steps(gradient, module._returns[key][name])

    return part
