"""Pictures that lie channels last: the same numbers, everything computed from them lies so too, and nothing twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.workers import two_residual_blocks
from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize
from shardwright.runtime.inputs import _images
from shardwright.runtime.shards import whole
from shardwright.zoo.reference import resolve

MODEL = "wresnet50:small,batch=8"


class Turned(TorchDispatchMode):
    """Counts convolutions, those whose input lies otherwise than channels last, and the gradients that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.turned = self.of_inputs = self.of_weights = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.all += 1
            self.turned += not args[0].is_contiguous(memory_format=torch.channels_last)
        if func is torch.ops.aten.convolution_backward.default:
            self.of_inputs, self.of_weights = self.of_inputs + args[10][0], self.of_weights + args[10][1]
        return func(*args, **(kwargs or {}))


def trained(model, args, kwargs, steps: int = 5):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(*args, **kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def pictures_channels_last(rank: int, search: str) -> tuple[int, ...]:
    model, args, kwargs, graph = two_residual_blocks()
    args = [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in args]
    reference = copy.deepcopy(model)
    wanted = trained(reference, args, kwargs)
    plan = plan_graph(graph, parse_cluster("2xH200"), Options(search=search, baselines=(), fewer_devices=False))
    parallel = parallelize(model, plan, graph=graph, keep=True)
    torch.testing.assert_close(trained(parallel, args, kwargs), wanted, rtol=1e-9, atol=1e-12)
    for path, parameter in reference.named_parameters():
        torch.testing.assert_close(
            whole(parallel.get_parameter(path).detach()), parameter.detach(), rtol=1e-8, atol=1e-11
        )
    with Turned() as seen:
        parallel(*args, **kwargs).backward()
    return seen.all, seen.turned, seen.of_inputs, seen.of_weights


@pytest.mark.parametrize("search", ["data-parallel", "fsdp"])
def test_what_is_computed_from_pictures_lies_as_they_do(pair, search):
    for convolutions, turned, of_inputs, of_weights in pair.run(pictures_channels_last, search):
        assert convolutions > 7 and turned == 0
        assert (of_inputs, of_weights) == (convolutions - 1, convolutions)  # each once, none of the pictures


@pytest.mark.parametrize(("dtype", "found"), [("bfloat16", 1), ("float32", 0)])
def test_pictures_in_halves_are_recognised(dtype, found):
    model = resolve(MODEL, dtype=dtype, device="meta")
    graph = capture(model.model, model.args, model.kwargs)
    assert len(_images(graph)) == found
    words = resolve("gpt:small", dtype=dtype, device="meta")
    assert not _images(capture(words.model, words.args, words.kwargs))
