"""Every model of the zoo builds on meta at full size, and learns something at its small size on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import zoo
from shardwright.errors import ModelError
from shardwright.zoo.reference import resolve

# Published counts: the papers, the model cards, or the arithmetic of their architectures.
PUBLISHED = {
    "alexnet:classes=1000": 62_378_344,
    "inception": 23_834_568,
    "inception:auxiliary=true": 27_161_264,
    "wresnet50:width=1": 25_557_032,
    "wresnet101:width=1": 44_549_160,
    "wresnet152:width=1": 60_192_808,
    "bert": 110_106_428,
    "gpt": 124_439_808,
    "gpt:layers=48,width=1600,heads=25": 1_557_611_200,
    "llama": 8_030_261_248,
    "llama:layers=80,width=8192,heads=64,kv_heads=8,inner=28672,vocab=32000": 68_976_648_192,
    "moe": 46_702_792_704,
}

# Tofu, table 2: gigabytes of weights, gradients and momentum together.
TOFU_GIGABYTES = {(50, 4): 4.2, (50, 10): 26.7, (101, 6): 17.1, (101, 10): 47.7, (152, 4): 10.5, (152, 10): 65.1}


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_full_size_builds_on_meta(name: str) -> None:
    resolved = resolve(name)
    tensors = [*resolved.model.parameters(), *resolved.model.buffers(), *resolved.args]
    assert all(tensor.is_meta for tensor in tensors)
    assert resolved.parameter_count == zoo.ENTRIES[name].parameters


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_small_size_learns(name: str) -> None:
    resolved = resolve(f"{name}:small", device="cpu")
    optimizer = torch.optim.AdamW(resolved.model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = resolved.model(*resolved.args, **resolved.kwargs)
        assert loss.shape == ()
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in resolved.model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("reference", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(reference: str, count: int) -> None:
    assert resolve(reference).parameter_count == count


@pytest.mark.parametrize(("shape", "gigabytes"), TOFU_GIGABYTES.items())
def test_wide_resnets_have_tofus_sizes(shape: tuple[int, int], gigabytes: float) -> None:
    layers, width = shape
    measured = resolve(f"wresnet{layers}:width={width}").parameter_count * 3 * 4 / 2**30
    assert measured == pytest.approx(gigabytes, rel=0.03)


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_a_meta_model_is_materialised_one_module_at_a_time(name: str) -> None:
    resolved = resolve(f"{name}:small")
    for module in resolved.model.modules():
        if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    inputs = resolve(f"{name}:small", device="cpu").args
    assert torch.isfinite(resolved.model(*inputs))


def test_dropout_drops() -> None:
    for name in zoo.ENTRIES:
        if "dropout" not in zoo.ENTRIES[name].sizes:
            continue
        resolved = resolve(f"{name}:small,dropout=0.5", device="cpu")
        first, second = (resolved.model(*resolved.args).item() for _ in range(2))
        assert first != second, name
        resolved.model.eval()
        first, second = (resolved.model(*resolved.args).item() for _ in range(2))
        assert first == second, name


def test_tied_heads_share_one_tensor() -> None:
    for name, head in (("gpt", "head"), ("bert", "decoder")):
        model = resolve(f"{name}:small").model
        assert model.get_submodule(head).weight is model.get_submodule("tokens").weight


def test_unrolled_cell_is_an_lstm() -> None:
    from shardwright.zoo.rnn import Cell

    torch.manual_seed(0)
    cell, reference = Cell(8), nn.LSTMCell(8, 8)
    with torch.no_grad():
        reference.weight_ih.copy_(cell.from_input.T)
        reference.weight_hh.copy_(cell.from_hidden.T)
        reference.bias_ih.copy_(cell.bias)
        reference.bias_hh.zero_()
    x, hidden, memory = torch.randn(3, 5, 8)
    torch.testing.assert_close(cell(x, hidden, memory), reference(x, (hidden, memory)))


def test_mixture_with_room_for_all_is_a_weighted_sum_of_experts() -> None:
    from shardwright.zoo.moe import MixtureFeed

    torch.manual_seed(0)
    feed = MixtureFeed(width=8, inner=12, experts=4, top_k=2, capacity_factor=100.0)
    x = torch.randn(2, 6, 8)
    mixed, _ = feed(x)
    weights, chosen = feed.router(x).softmax(-1).topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    everything = torch.stack([feed.experts(x.unsqueeze(1).expand(2, 4, 6, 8))[:, e] for e in range(4)], dim=2)
    picked = everything.gather(2, chosen.unsqueeze(-1).expand(2, 6, 2, 8))
    torch.testing.assert_close(mixed, (picked * weights.unsqueeze(-1)).sum(2))


def test_mixture_drops_what_exceeds_the_capacity() -> None:
    from shardwright.zoo.moe import MixtureFeed

    torch.manual_seed(0)
    feed = MixtureFeed(width=8, inner=12, experts=4, top_k=1, capacity_factor=1.0)
    with torch.no_grad():
        feed.router.weight.copy_(torch.eye(4, 8))
    x = torch.zeros(1, 8, 8)
    x[..., 0] = 5.0  # every token wants expert 0, which takes two
    mixed, balance = feed(x)
    assert (mixed[0, :2].abs().sum(-1) > 0).all()
    assert (mixed[0, 2:] == 0).all()
    assert balance > 3.5


@pytest.mark.parametrize(
    ("sizes", "fragment"),
    [
        ({"layrs": 3}, "did you mean layers"),
        ({"layers": 0}, "layers=0"),
        ({"layers": 2.5}, "layers=2.5"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"width": 100, "heads": 12}, "width of 100"),
    ],
)
def test_bad_sizes_are_refused_in_one_sentence(sizes: dict[str, float], fragment: str) -> None:
    with pytest.raises(ModelError) as refusal, torch.device("meta"):
        zoo.build("gpt", **sizes)
    assert fragment in refusal.value.message
    assert refusal.value.remedy
