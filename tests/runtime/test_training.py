"""What training loops do: accumulate, clip, mix precisions, start from meta, compile."""

from __future__ import annotations

import copy
import functools
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lowering.strategies import chosen_strategy, mesh_with, random_strategy
from runtime.workers import captured, device_mesh
from shardwright.cluster import parse_cluster
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.operators.strategy import Strategy
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize
from shardwright.runtime.clipping import clip_gradients
from shardwright.runtime.materialise import parameters_on_meta
from shardwright.runtime.meshes import known_mesh


class Net(torch.nn.Module):
    """Two linear layers whose first weight is read twice; small enough to compile in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.second = torch.nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(torch.tanh(self.first(x)))
        logits = self.second(hidden)
        return {"loss": torch.nn.functional.cross_entropy(logits, y), "logits": logits}


@functools.lru_cache
def example(dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    model = Net().to(dtype)
    x, y = torch.randn(8, 16, dtype=dtype), torch.randint(5, (8,))
    return model, (x, y), captured(model, (x, y))


def fsdp_like(graph, mesh, again: bool = True) -> Strategy:
    """Every operator cut along the batch where it can be, parameters sharded along their first dim."""

    def split(_, options):
        return next(
            (o for o in options if o[0] in ("i0", "b", "n", "i")), options[-1] if options[-1][0] else options[0]
        )

    def layout(name, options):
        wanted = (Shard(0),)
        return wanted if wanted in options else options[0]

    strategy = chosen_strategy(graph, mesh, split, layout, kept=False)
    names = frozenset(p.tensor for p in graph.parameters) if again else frozenset()
    return Strategy(strategy.axes, strategy.splits, strategy.resting, {}, names)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(parallel, model) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parallel.get_parameter(name).grad), parameter.grad, rtol=1e-9, atol=1e-12)


def accumulates(rank: int) -> None:
    model, (x, y), graph = example()
    reference = copy.deepcopy(model)
    for seed in range(3):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
        reference(x + noise, y)["loss"].backward()
    for again in (True, False):
        parallel = parallelize(
            model, fsdp_like(graph, mesh_with((4,)), again), mesh=device_mesh((4,)), graph=graph, keep=True
        )
        for mode in ("held back", "reduced each time"):
            parallel.zero_grad()
            for seed in range(3):
                noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
                parallel.gradients.hold = mode == "held back" and seed < 2
                parallel(x + noise, y)["loss"].backward()
            close(parallel, reference)


def holds_back(rank: int) -> None:
    model, (x, y), graph = example()
    parallel = parallelize(model, fsdp_like(graph, mesh_with((4,))), mesh=device_mesh((4,)), graph=graph, keep=True)
    with parallel.no_sync():
        parallel(x, y)["loss"].backward()
    assert all(parameter.grad is None for parameter in parallel.parameters())


def clips(rank: int) -> None:
    model, (x, y), graph = example()
    reference = copy.deepcopy(model)
    (1000 * reference(x, y)["loss"]).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    for seed in range(3):
        parallel = parallelize(
            model, random_strategy(graph, mesh_with((2, 2)), seed), mesh=device_mesh((2, 2)), graph=graph, keep=True
        )
        (1000 * parallel(x, y)["loss"]).backward()
        torch.testing.assert_close(clip_gradients(parallel, 1.0), expected, rtol=1e-9, atol=0)
        close(parallel, reference)
        parallel.zero_grad()
        (1000 * parallel(x, y)["loss"]).backward()  # PyTorch's own function understands the DTensors too
        torch.testing.assert_close(
            whole(torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)), expected, rtol=1e-9, atol=0
        )
        close(parallel, reference)


def user_loss(rank: int) -> None:
    """A loss outside of the model: results come as DTensors where they are cut, and gradients find their way back."""
    model, (x, y), graph = example()
    reference = copy.deepcopy(model)
    reference(x, y)["logits"].square().sum().backward()
    for seed in range(4):
        parallel = parallelize(
            model, random_strategy(graph, mesh_with((2, 2)), seed), mesh=device_mesh((2, 2)), graph=graph, keep=True
        )
        whole(parallel(x, y)["logits"]).square().sum().backward()
        close(parallel, reference)


def mixes(rank: int) -> None:
    """bfloat16 compute, float32 masters and gradients: the numbers of a bfloat16 model."""
    model, (x, y), graph = example(torch.bfloat16)
    masters = copy.deepcopy(model).float()
    strategy = fsdp_like(graph, mesh_with((4,)))
    parallel = parallelize(
        masters, strategy, mesh=device_mesh((4,)), graph=graph, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    parallel(x, y)["loss"].backward()
    reference = copy.deepcopy(model)
    reference(x, y)["loss"].backward()
    for name, parameter in reference.named_parameters():
        found = parallel.get_parameter(name)
        assert found.dtype == found.grad.dtype == torch.float32
        scale = parameter.grad.float().abs().max()
        assert (whole(found.grad) - parameter.grad.float()).abs().max() < 0.03 * scale


def under_autocast(rank: int, plan) -> None:
    """A call under autocast is refused, and what the refusal advises works: the numbers of one device in that precision."""
    model, (x, y), _ = example(torch.bfloat16)
    mesh = init_device_mesh(
        "cpu", plan.stages[0].strategy.sizes, mesh_dim_names=tuple(name for name, _ in plan.stages[0].strategy.axes)
    )
    masters = copy.deepcopy(model).float()
    parallel = parallelize(masters, plan, mesh=mesh, compute_dtype=torch.bfloat16, keep=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RunError, match="called under torch"):
        parallel(x, y)
    loss = parallel(x, y)["loss"]
    assert loss.dtype == torch.bfloat16
    assert abs(loss.float() - copy.deepcopy(model)(x, y)["loss"].float()) < 0.02
    loss.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in parallel.parameters())


def starts_from_meta(rank: int) -> list[torch.Tensor]:
    with parameters_on_meta():
        model = Net()
    _, (x, y), graph = example(torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(5)
    sizes, seed = ((4,), 1) if rank < 4 else ((2, 2), 2)
    parallel = parallelize(model, random_strategy(graph, mesh_with(sizes), seed), mesh=device_mesh(sizes), graph=graph)
    loss = parallel(x, y)["loss"]
    loss.backward()
    return [whole(p.detach()) for p in parallel.parameters()]


def starts_from_safetensors(rank: int, path: str) -> None:
    model, _, graph = example(torch.float32)
    with torch.device("meta"):
        empty = Net()
    parallel = parallelize(
        empty, random_strategy(graph, mesh_with((2, 2)), 3), mesh=device_mesh((2, 2)), graph=graph, weights=path
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parallel.get_parameter(name).detach()), parameter)


def refuses_other_weights(rank: int, path: str) -> list[str]:
    """Every way in which stored names can fail to be the model's, as a sentence; asked for, they are taken."""
    _, _, graph = example(torch.float32)
    strategy, mesh, said = random_strategy(graph, mesh_with((2, 2)), 3), device_mesh((2, 2)), []
    for file in sorted(Path(path).iterdir()):
        with pytest.raises(RunError) as caught:
            parallelize(Net(), strategy, mesh=mesh, graph=graph, weights=file)
        said.append(f"{file.name}: {caught.value}")
    torch.manual_seed(0)
    unrelated = Path(path) / "unrelated.safetensors"
    parallel = parallelize(Net(), strategy, mesh=mesh, graph=graph, weights=unrelated, strict=False)
    torch.manual_seed(0)
    for name, parameter in Net().named_parameters():
        assert torch.equal(whole(parallel.get_parameter(name).detach()), parameter)
    return said


def refuses_unknown_initialisers(rank: int) -> str:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    with torch.device("meta"):
        model = Bare()
    graph = capture(model, (torch.zeros(8, 8, device="meta"),))
    with pytest.raises(RunError) as caught:
        parallelize(model, random_strategy(graph, mesh_with((4,)), 1), mesh=device_mesh((4,)), graph=graph)
    return caught.value.message


def compiles(rank: int) -> None:
    model, (x, y), graph = example(torch.float32)
    reference = copy.deepcopy(model).double()
    reference(x.double(), y)["loss"].backward()
    for seed in (1,):
        parallel = parallelize(
            model, random_strategy(graph, mesh_with((2, 2)), seed), mesh=device_mesh((2, 2)), graph=graph, keep=True
        )
        compiled = torch.compile(parallel, fullgraph=True, backend="aot_eager")
        compiled(x, y)["loss"].backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(
                whole(parallel.get_parameter(name).grad).double(), parameter.grad, rtol=1e-4, atol=1e-6
            )


def takes_over(rank: int) -> None:
    """The model gives up its tensors as their shards are made; what rests whole stays where it is."""
    model = copy.deepcopy(example()[0])
    _, (x, y), graph = example()
    strategy = fsdp_like(graph, mesh_with((4,)))
    sharded, whole_ones = {}, {}
    for entry in graph.parameters:
        parameter = model.get_parameter(entry.paths[0])
        kept = strategy.resting[entry.tensor] == (Replicate(),)
        (whole_ones if kept else sharded)[entry.paths[0]] = (weakref.ref(parameter), parameter.data_ptr())
        del parameter
    assert sharded
    parallel = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph)
    assert all(gone() is None for gone, _ in sharded.values())
    for path, (_, where) in whole_ones.items():
        assert parallel.get_parameter(path).to_local().data_ptr() == where
    assert all(model.get_parameter(name) is parameter for name, parameter in parallel.named_parameters())
    with pytest.raises(RunError, match="split already"):
        parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph)
    before = {name: parameter.detach().clone() for name, parameter in example()[0].named_parameters()}
    kept_model = parallelize(example()[0], strategy, mesh=device_mesh((4,)), graph=graph, keep=True)
    kept_model(x, y)["loss"].backward()
    torch.optim.SGD(kept_model.parameters(), lr=1.0).step()
    for name, parameter in example()[0].named_parameters():
        assert torch.equal(parameter, before[name])


def freezes(rank: int) -> None:
    """Parameters may be frozen and thawed between steps; shared gradients are not shared memory."""
    model, (x, y), graph = example()
    reference = copy.deepcopy(model)
    parallel = parallelize(
        model, random_strategy(graph, mesh_with((2, 2)), 0), mesh=device_mesh((2, 2)), graph=graph, keep=True
    )
    for trained in (False, True):
        for module in (reference, parallel):
            module.zero_grad()
            module.get_parameter("second.bias").requires_grad_(trained)
            module(x, y)["loss"].backward()
        assert (parallel.get_parameter("second.bias").grad is None) is not trained
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(
                    whole(parallel.get_parameter(name).grad), parameter.grad, rtol=1e-9, atol=1e-12
                )
    places = [p.grad.to_local().data_ptr() for p in parallel.parameters() if p.grad is not None]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("what", [takes_over, freezes, accumulates, holds_back, clips, user_loss, mixes])
def test_on_four_ranks(pool, what):
    pool.run(what)


def test_autocast(pool):
    graph = example(torch.bfloat16)[2]
    options = Options(search="data-parallel", baselines=(), fewer_devices=False)
    pool.run(under_autocast, plan_graph(graph, parse_cluster("local:4"), options), seconds=120)


def test_meta(pool):
    found = pool.run(starts_from_meta)
    torch.manual_seed(0)
    for one, other in zip(found[0], found[3], strict=True):
        assert torch.equal(one, other)
    assert found[0][0].std() > 0


def test_meta_without_initialiser(pool):
    assert all("does not say how it is filled" in message for message in pool.run(refuses_unknown_initialisers))


def test_safetensors(pool, tmp_path):
    save = pytest.importorskip("safetensors.torch").save_file
    save(dict(example(torch.float32)[0].state_dict()), tmp_path / "model.safetensors")
    pool.run(starts_from_safetensors, str(tmp_path))


def test_weights_of_another_model(pool, tmp_path):
    save = pytest.importorskip("safetensors.torch").save_file
    state = dict(example(torch.float32)[0].state_dict())
    others = {
        "prefixed": {f"module.{name}": tensor for name, tensor in state.items()},
        "unrelated": {"other": torch.zeros(3)},
        "missing": {name: tensor for name, tensor in state.items() if name != "norm.bias"},
        "more": {**state, "extra.weight": torch.zeros(2)},
        "shape": {**state, "norm.bias": torch.zeros(7)},
    }
    folder = tmp_path / "weights"
    folder.mkdir()
    for name, tensors in others.items():
        save(tensors, folder / f"{name}.safetensors")
        dcp.save(tensors, checkpoint_id=str(folder / name), no_dist=True)
    for rank in pool.run(refuses_other_weights, str(folder)):
        said = dict(line.split(": ", 1) for line in rank)
        assert len(said) == 10
        for kind in ("", ".safetensors"):
            assert "6 missing (" in said["prefixed" + kind] and "begin with 'module.'" in said["prefixed" + kind]
            assert "6 missing (" in said["unrelated" + kind] and "1 unexpected (other)" in said["unrelated" + kind]
            assert "1 missing (norm.bias)" in said["missing" + kind]
            assert "1 unexpected (extra.weight)" in said["more" + kind]
            assert "norm.bias is [7] there and [24] in the model" in said["shape" + kind]


def test_compiles_whole(pool):
    pool.run(compiles, seconds=200)


def threads_of_two_meshes(rank: int) -> tuple[bool, int]:
    axes = (("rows", 2), ("columns", 2))
    first = known_mesh((0, 1, 2, 3), axes, "cpu")
    dist.all_reduce(torch.ones(1), group=first.get_group("rows"))
    before = len(os.listdir("/proc/self/task"))
    again = known_mesh((0, 1, 2, 3), axes, "cpu")
    dist.all_reduce(torch.ones(1), group=again.get_group("columns"))
    dist.all_reduce(torch.ones(1), group=again.get_group("rows"))
    return again is first, len(os.listdir("/proc/self/task")) - before


def test_models_of_one_job_share_their_process_groups(pool):
    """Each had groups of its own: communicators on GPUs, and three threads a group with gloo."""
    assert pool.run(threads_of_two_meshes) == [(True, 0)] * 4
