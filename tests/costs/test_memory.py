"""Predicted peak memory against what PyTorch's allocator reports for the real model, on one CPU process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.profiler import ProfilerActivity, profile

from program.steps import memory_of
from runtime.performed import peak_of
from shardwright import zoo
from shardwright.cluster import Mesh, mesh_of, parse_cluster
from shardwright.costs.memory import MemoryUse
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy


def whole(graph: Graph, mesh: Mesh) -> Strategy:
    alike = (Replicate(),) * len(mesh.axes)
    splits = {op.name: (None,) * len(mesh.axes) for op in graph.ops}
    return Strategy(mesh.names, splits, dict.fromkeys(graph.sources, alike))


def measured(model: torch.nn.Module, args: tuple[Any, ...]) -> int:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(*args).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    state = [v for values in optimizer.state.values() for v in values.values() if v.dim()]
    held = [*model.parameters(), *model.buffers(), *state, *args]
    return sum(t.numel() * t.itemsize for t in held) + peak_of(profiler)


def of_kind(use: MemoryUse, kind: str) -> int:
    """Bytes of one kind at the peak."""
    at = use.curve.index(max(use.curve))
    return sum(s.bytes for s in use.storages if s.kind == kind and s.born <= at <= s.dies)


def predicted(model: torch.nn.Module, args: tuple[Any, ...], cluster: str = "local:1") -> MemoryUse:
    mesh = mesh_of(parse_cluster(cluster))
    graph = capture(model, args)
    return memory_of(graph, whole(graph, mesh), mesh)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "moe", "transformer", "rnn"])
def test_peak_is_exact_where_no_library_hides_memory(name: str) -> None:
    model, args, _ = zoo.build(name, **zoo.entry(name).small)
    assert predicted(model, args).peak == pytest.approx(measured(model, args), rel=1e-3)


@pytest.mark.parametrize("name", ["wresnet50", "inception"])
def test_peak_of_convolutions_is_close(name: str) -> None:
    model, args, _ = zoo.build(name, **zoo.entry(name).small)
    assert predicted(model, args).peak == pytest.approx(measured(model, args), rel=0.03)


def test_dropout_and_a_tied_weight() -> None:
    torch.manual_seed(0)

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(200, 64)
            self.drop = torch.nn.Dropout(0.2)
            self.inner = torch.nn.Linear(64, 64)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.drop(self.table(tokens))
            x = x + self.drop(torch.relu(self.inner(x)))
            return torch.logsumexp(x @ self.table.weight.T, -1).mean()

    model, args = Tied(), (torch.randint(200, (8, 32)),)
    assert predicted(model, args).peak == pytest.approx(measured(model, args), rel=1e-3)


def test_what_the_peak_is_made_of() -> None:
    model, args, _ = zoo.build("gpt", **zoo.entry("gpt").small)
    use = predicted(model, args, "1xH200")
    parameters = sum(p.numel() * p.itemsize for p in model.parameters())
    assert of_kind(use, "parameters") == parameters
    assert of_kind(use, "optimizer state") == 2 * parameters
    assert of_kind(use, "library workspace") == 64 * 2**20
    held = max((s for s in use.storages if s.module.startswith("blocks.") and s.born >= 0), key=lambda s: s.bytes)
    assert (held.bytes, held.what, held.module) == (4 * 16 * 32 * 4 * 4, "linear", "blocks.0.feed.up")


def test_adamw_on_cuda_needs_one_more_copy_of_the_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    use = predicted(model, (torch.zeros(1, 1024),), "1xH200")
    parameters = sum(p.numel() * p.itemsize for p in model.parameters())
    assert max(use.curve) - of_kind(use, "library workspace") == pytest.approx(5 * parameters, rel=1e-2)


class HalfUsed(torch.nn.Module):
    """A call leaves one layer out, as a language model does with a vision tower that sees no picture."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(64, 64), torch.nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().mean()


def test_a_parameter_without_a_gradient_has_no_optimizer_state() -> None:
    model, args = HalfUsed(), (torch.randn(8, 64),)
    assert predicted(model, args).peak == pytest.approx(measured(model, args), rel=1e-3)
    trained = sum(p.numel() * p.itemsize for p in model.used.parameters())
    assert of_kind(predicted(model, args, "1xH200"), "optimizer state") == 2 * trained


def test_a_recorded_step_needs_what_rests_and_one_segment() -> None:
    """On CUDA both passes lie in one segment for good, of what is alive in them at once."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    use = predicted(model, (torch.zeros(4096, 1024),), "1xH200")
    layer, parameter, workspace = 16 * 2**20, 4 * 2**20, 32 * 2**20
    assert use.recorded and use.needed == use.reserved
    # three parameters a weight (AdamW), three workspaces, the batch where it is given and where recordings read it
    rests = 5 * 20 * 2**20 - 2 * 20 * 2**20 + 3 * workspace + 2 * layer
    inside = [s for s in use.storages if s.born >= 0 and "adamw" not in s.what]
    moments = range(len(use.curve))
    alive = max(sum(s.bytes for s in inside if s.born <= m <= s.dies and s.bytes > 2**20) for m in moments)
    assert alive >= 4 * layer + parameter
    assert use.needed == pytest.approx(rests + alive, abs=4 * 2**20)
    assert not predicted(model, (torch.zeros(4096, 1024),)).recorded


def test_results_that_are_handed_out_stay_in_a_recorded_step() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = torch.tanh(self.inner(x)).exp()
            return made.square().mean(), made

    class One(Both):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return super().forward(x)[0]  # type: ignore[return-value]

    batch = (torch.zeros(8192, 1024),)
    both, one = predicted(Both(), batch, "1xH200"), predicted(One(), batch, "1xH200")
    assert any(s.handed and s.bytes == 32 * 2**20 for s in both.storages)
    assert not any(s.handed and s.bytes == 32 * 2**20 for s in one.storages)
    assert both.needed >= one.needed


def test_a_cut_batch_norm_needs_nothing_beside_its_results_on_cuda() -> None:
    """Its pieces are five kernels there; on tensors without data they are written out."""
    from shardwright.planner import Options, plan_graph
    from shardwright.simulator import simulate_plan

    layers = torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Flatten(), torch.nn.LazyLinear(1)
    model, images = torch.nn.Sequential(*layers), torch.zeros(8, 3, 32, 32)
    model(images)
    graph = capture(model, (images,))
    options = Options(search="data-parallel", baselines=(), fewer_devices=False)
    for cluster, fused in (("2xH200", True), ("local:2", False)):
        use = simulate_plan(plan_graph(graph, parse_cluster(cluster), options), graph).stage().memory
        inside = [s.bytes for s in use.storages if s.what.startswith("inside _native_batch_norm")]
        assert (sum(inside) < 2**10) == fused
