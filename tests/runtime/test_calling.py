"""A call may be written otherwise than the one that was planned: keywords for positions, defaults given or left out."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.cluster import parse_cluster
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize
from shardwright.runtime.calling import Calling, example


class Model(torch.nn.Module):
    """Takes plain values beside tensors, and a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, mask=None, pair=None, scale: float = 1.0, *, square: bool = True) -> torch.Tensor:
        hidden = self.linear(x) * scale
        hidden = hidden if mask is None else hidden * mask
        hidden = hidden if pair is None else hidden + pair[0] - pair[1]["y"]
        return hidden.square().sum() if square else hidden.sum()


@functools.lru_cache
def planned():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 8)
    graph = capture(model, (x,), {"mask": torch.ones(8, 8), "pair": [x, {"y": x}], "square": False})
    options = Options(search="data-parallel", baselines=(), fewer_devices=False)
    return model, x, plan_graph(graph, parse_cluster("local:4"), options)


def test_every_way_to_write_a_call():
    model, x, plan = planned()
    calling = Calling.of(model.forward, plan.graph())
    mask, pair, expected = torch.ones(8, 8), [x, {"y": x}], (1, ["mask", "pair", "square"])
    for args, kwargs in (
        ((x,), {"mask": mask, "pair": pair, "square": False}),
        ((x,), {"square": False, "pair": pair, "mask": mask}),
        ((x, mask, pair), {"square": False}),
        ((), {"pair": pair, "x": x, "mask": mask, "square": False}),
        ((x, mask, pair, 1.0), {"square": False}),
        ((x, mask), {"pair": pair, "scale": 1.0, "square": False}),
    ):
        arranged, named = calling.arranged(args, kwargs)
        assert (len(arranged), list(named)) == expected and arranged[0] is x and named["mask"] is mask
    assert calling.arranged((x,), {"mask": mask, "pair": pair})[1]["square"] is True  # its default, refused later
    assert calling.arranged((x,), {"mask": mask, "pair": pair, "scale": 2.0})[1]["scale"] == 2.0


def test_the_planned_call_is_rebuilt_with_its_plain_values():
    _, _, plan = planned()
    args, kwargs = example(plan.graph())
    assert args[0].is_meta and list(kwargs) == ["mask", "pair", "square"]
    assert kwargs["square"] is False and kwargs["pair"][1]["y"].shape == (8, 8)


def calls(rank: int, plan) -> None:
    model, x, _ = planned()
    mesh = init_device_mesh(
        "cpu", plan.stages[0].strategy.sizes, mesh_dim_names=tuple(name for name, _ in plan.stages[0].strategy.axes)
    )
    parallel = parallelize(model, plan, mesh=mesh, keep=True)  # square=False is remembered, the pair is rebuilt
    mask, pair = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)), [x, {"y": x + 1}]
    expected = model(x, mask, pair, square=False)
    for found in (parallel(x, mask, pair, square=False), parallel(pair=pair, mask=mask, x=x, scale=1.0, square=False)):
        torch.testing.assert_close(found, expected)
    for args, kwargs in (((x, mask, pair), {}), ((x, mask, pair, 2.0), {"square": False}), ((x, mask), {})):
        torch.testing.assert_close(parallel(*args, **kwargs), model(*args, **kwargs))  # programs of their own
    assert len(parallel._programs) == 4
    with pytest.raises(RunError, match=r"lacks the argument .* It has no program of its own, because.*'x'"):
        parallel(mask=mask)


def test_calls_of_a_parallelized_module(pool):
    pool.run(calls, planned()[2], seconds=120)
