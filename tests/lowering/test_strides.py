"""Traces hold for the strides they were made with: tensors that lie otherwise in the next step give the numbers of eager
mode, operator by operator and in models on two ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lowering.strategies import mesh_with
from runtime.workers import captured, device_mesh
from shardwright._torch_compat import writes_in_place
from shardwright.lowering.strides import as_traced
from shardwright.lowering.tracing import trace
from shardwright.program import footprints
from shardwright.program.footprints import OperatorCall, Strided
from shardwright.program.nodes import kept_outputs
from shardwright.runtime import parallelize
from shardwright.runtime.executor import TRACED_AFTER
from shardwright.runtime.shards import whole
from shardwright.verification.forced import forced_strategies
from shardwright.verification.prepare import widened
from shardwright.verification.samples import concrete


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])


def within(x: torch.Tensor) -> torch.Tensor:
    """A slice of something larger, that does not begin at its beginning."""
    larger = x.new_zeros([extent + 2 for extent in x.shape])
    for dim, extent in enumerate(x.shape):
        larger = larger.narrow(dim, 1, extent)
    return larger.copy_(x)


WAYS = (contiguous, channels_last, turned, within)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def eye(*shape: int) -> torch.Tensor:
    return torch.eye(shape[-1], dtype=torch.float64) + 0.1 * rand(*shape)


CALLS = {
    "aten.group_norm.default": lambda: (rand(2, 4, 6, 6), 2, rand(4), rand(4)),
    "aten._weight_norm_interface.default": lambda: (rand(4, 6), rand(4, 1), 0),
    "aten.scaled_dot_product_attention.default": lambda: (rand(2, 2, 6, 8), rand(2, 2, 6, 8), rand(2, 2, 6, 8)),
    "aten.linalg_det.default": lambda: (eye(2, 5, 5),),
    "aten.view_as_real.default": lambda: (torch.complex(rand(2, 4, 6), rand(2, 4, 6)),),
    "aten.conv2d.default": lambda: (rand(2, 4, 6, 6), rand(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4),
    "aten.batch_norm.default": lambda: (rand(2, 4, 6, 6), rand(4), rand(4), None, None, True, 0.1, 1e-5, False),
    "aten.upsample_bilinear2d.vec": lambda: (rand(2, 4, 6, 6), None, False, [2.0, 2.0]),
    "aten.max_pool2d.default": lambda: (rand(2, 4, 6, 6), [2, 2]),
}


@pytest.mark.parametrize("target", CALLS)
def test_what_is_traced_takes_any_strides(target):
    torch.manual_seed(0)
    sample = concrete(target, CALLS[target]())
    # PyTorch's own backward of a weight norm refuses what is not contiguous.
    same_as_eager(sample.op, sample.inputs, (contiguous,) if "weight_norm" in target else WAYS)


def same_as_eager(op, inputs, ways) -> None:
    call = OperatorCall.of(op)
    like = tuple(Strided(tuple(x.shape), tuple(x.stride()), str(x.dtype)[6:], True) for x in inputs)

    def run(*tensors):
        arguments = [footprints._value(a, tensors) for a in call.args]
        made = footprints.resolve(call.target)(*arguments, **{k: footprints._value(v, tensors) for k, v in call.kwargs})
        return tuple(made) if isinstance(made, tuple) else (made,)

    footprint = footprints.forward(call, like, "cpu")
    outputs = tuple(range(len(footprint.results)))
    rules = SimpleNamespace(kind="")
    node = SimpleNamespace(call=call, kernel=None, local=op, rules=rules, outputs=outputs, footprint=footprint)
    found = trace(node, run, like, (0,), (), torch.device("cpu"))
    assert found is not None
    for lies in ways:
        for arrives in WAYS:
            given = [lies(x.detach()).requires_grad_() for x in inputs]
            made = run(*given)
            gradient = arrives(torch.randn_like(made[0]))
            wanted = torch.autograd.grad(made[0], given, gradient)
            with torch.no_grad():
                results, own = found.forward([x.detach() for x in given])
                kept = [x.detach() if i in footprint.saved_inputs else None for i, x in enumerate(given)]
                kept += [x if i in kept_outputs(node) else None for i, x in enumerate(results)]
                arrived = [gradient, *[None] * (len(made) - 1)]
                gradients = found.backward(own, kept, arrived, range(len(given)), True)
            torch.testing.assert_close(results[0], made[0].detach())
            torch.testing.assert_close(gradients, list(wanted), msg=f"{lies.__name__}, {arrives.__name__}")


def test_only_what_lies_otherwise_is_copied():
    x = torch.randn(3, 4)
    assert as_traced(x, (4, 1)) is x
    row = x[:1].t()  # a dimension of one element may have any stride
    assert as_traced(row, (1, 7)) is row
    torch.testing.assert_close(as_traced(x.t(), (3, 1)), x.t())
    assert as_traced(x.t(), (3, 1)).is_contiguous()
    torch.testing.assert_close(as_traced(x, (0, 1)), x)  # was expanded when it was traced


class UNet(nn.Module):
    """Group norms after upsampling and joining, a strided and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.middle, self.deep = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.joined, self.last = nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x, target):
        x = self.first(x)
        y = self.deep(F.silu(self.middle(self.down(x))))
        y = torch.cat([F.interpolate(y, scale_factor=2, mode="nearest"), x], 1)
        return F.mse_loss(self.last(F.silu(self.joined(y))), target)


class Norms(nn.Module):
    """Normalised as it is given. And a gradient that comes through a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch, self.mixed = nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x, target):
        x = self.scale * x
        y = self.norm(x) + self.batch(x)
        y = self.mixed(y.transpose(2, 3)).permute(0, 3, 1, 2)
        return F.mse_loss(y.permute(0, 2, 3, 1).transpose(2, 3), target)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Linear(8, 8)

    def forward(self, x, target):
        q = F.scaled_dot_product_attention(x, x, x)
        return F.mse_loss(self.out(self.norm(q)), target)


class Routed(nn.Module):
    """Dbrx: rows of an expert, found with their place among the best, so that the strides of the find hang on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, target):
        rows = x.reshape(-1, 8)
        weights, best = self.gate(rows).softmax(-1).topk(2)
        mask = F.one_hot(best, 3).permute(2, 1, 0)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            place, row = torch.where(mask[number])
            made = made.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return F.mse_loss(made.view_as(x), target)


MODELS = {"unet": UNet, "norms": Norms, "attention": Attention, "routed": Routed}


def other_strides_every_step(rank: int, name: str) -> tuple[int, int]:
    """The strategies that were run, and the operators whose trace was."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, 8, 8)
    model, args, _ = widened(MODELS[name](), (x, torch.randn(4, 4, 8, 8)), {})
    graph = captured(model, args)
    strategies = dict(forced_strategies(graph, mesh_with((2,))))
    traced = 0
    chosen = [title for title in ("batch", "features") if title in strategies]
    for title in chosen:
        reference, mine = copy.deepcopy(model), copy.deepcopy(model)
        parallel = parallelize(mine, strategies[title], mesh=device_mesh((2,)), graph=graph, keep=True)
        for step in range(TRACED_AFTER + len(WAYS) + 2):
            lies = WAYS[max(0, step - TRACED_AFTER) % len(WAYS)]
            given = [lies(x + step) for x in args]
            losses = []
            for here in (reference, parallel):
                here.zero_grad()
                loss = here(*given)
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-11)
            for path, parameter in reference.named_parameters():
                gradient = whole(parallel.get_parameter(path).grad)
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-8, atol=1e-11, msg=f"{path}, {lies}")
        traced += sum(found.traced for found in parallel._planned.executor._computation._derivatives.values())
    return len(chosen), traced


@pytest.mark.parametrize("name", MODELS)
def test_tensors_may_lie_otherwise_in_every_step(pair, name):
    for strategies, traced in pair.run(other_strides_every_step, name):
        assert strategies == 2 and traced > 2


@pytest.mark.parametrize("strides", [(60, 1, 15, 3), (60, 20, 5, 1), (1, 2, 6, 24)])
def test_nothing_is_written_in_place(strides):
    """Compiled regions refuse what is: they ran uncompiled wherever a gradient arrived with other strides."""
    x = torch.randn(5, 4, 3, 2).permute(3, 2, 1, 0)
    x = x.contiguous() if x.stride() == strides else x
    graph = make_fx(lambda x: as_traced(x, strides))(x).graph
    assert not any(writes_in_place(n.target) for n in graph.nodes if n.op == "call_function")
    assert as_traced(x, strides).stride() == strides
    torch.testing.assert_close(as_traced(x, strides), x)
