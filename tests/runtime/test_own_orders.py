"""Rows that are sorted by expert and brought back: every rank may sort its own, and the numbers stay those of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowering.strategies import mesh_with
from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible, LoweringError
from shardwright.frontend import capture
from shardwright.graph import Graph, Op
from shardwright.graph.orders import GROUPED
from shardwright.operators.rules import OWN, OpRules, Split, own_axes
from shardwright.operators.strategy import Strategy
from shardwright.planner import Options, describe_graph, plan_graph
from shardwright.program.microbatches import microbatches
from shardwright.search.options import EVERYTHING, Restriction, splits_of
from shardwright.search.strategies import find_strategy
from shardwright.verification.verify import check

pytest.importorskip("transformers")


class Experts(nn.Module):
    """Two of four experts for each row, as Hugging Face's grouped products have it. ``counted``: the loss reads how many
    rows each expert has, which no piece of the rows knows. ``joined``: that rows are of the batch only their reader says."""

    def __init__(self, counted: bool = False, by_sorting: bool = False, joined: bool = False) -> None:
        import transformers.integrations.moe  # noqa: F401 # registers the operator

        super().__init__()
        torch.manual_seed(0)
        self.first, self.router, self.last = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.up = nn.Parameter(torch.randn(4, 8, 12) * 0.4)
        self.down = nn.Parameter(torch.randn(4, 6, 8) * 0.4)
        self.counted, self.by_sorting, self.joined = counted, by_sorting, joined

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).flatten(0, 1)
        if self.joined:
            h = torch.cat([h[:10], h[10:]])  # as pictures are put between words
        shares, chosen = self.router(h).softmax(-1).topk(2, -1)
        keys, places = torch.sort(chosen.reshape(-1))
        counts = torch.histc(keys.to(h.dtype), bins=4, min=0, max=3)
        ends = counts.cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        gate, value = product(h[places // 2], self.up, offs=ends).chunk(2, -1)
        rows = product(nn.functional.silu(gate) * value, self.down, offs=ends)
        rows = rows * shares.reshape(-1)[places].unsqueeze(-1)
        if self.by_sorting:
            back = torch.argsort(places)
        else:
            back = torch.empty_like(places)
            back[places] = torch.arange(places.shape[0])
        found = self.last(rows[back].view(-1, 2, 8).sum(1))
        found = found * x.flatten(0, 1)[:, :3] if self.joined else found
        return found.pow(2).mean() + (counts.pow(2).mean() * shares.mean() if self.counted else 0.0)


def example(**how: bool) -> tuple[Experts, Tensor]:
    torch.manual_seed(1)
    return Experts(**how).double(), torch.randn(4, 6, 5, dtype=torch.float64)


def captured(**how: bool) -> Graph:
    model, x = example(**how)
    return capture(model, (x,))


def pinned(wanted: Callable[[Op, Split], bool]) -> Restriction:
    return Restriction("pinned", split=functools.partial(_wanted, wanted))


def _wanted(wanted: Callable[[Op, Split], bool], op: Op, rules: OpRules, split: Split) -> bool:
    return wanted(op, split)


def strategies_of(graph: Graph, sizes: tuple[int, ...]) -> dict[str, Strategy]:
    """The best for every split of the products in which some axis has rows in orders of their own."""
    described, mesh, found = describe_graph(graph), mesh_with(sizes), {}
    for op in (op for op in graph.ops if op.target in GROUPED):
        for split in splits_of(op, described.rules[op.name], sizes, {}, EVERYTHING):
            if OWN in split:
                within = pinned(lambda other, chosen, op=op, split=split: other is not op or chosen == split)  # type: ignore[misc]
                found[f"{op.name} by {split}"] = find_strategy(described, mesh, within=within).strategy
    return found


def agree(rank: int, graph: Graph, strategies: dict[str, Strategy], how: dict[str, bool]) -> list[str]:
    wrong = []
    for name, strategy in strategies.items():
        model, x = example(**how)
        answer = check(model, (x,), {}, strategy, steps=2, graph=graph)
        if answer is not None and not answer.agrees:
            wrong.append(f"{name}: {answer.as_dict()['disagreeing']}")
    return wrong


def test_all_that_handle_sorted_rows_are_of_the_batch_or_none():
    graph = captured(joined=True)  # ERNIE's and MiniMax's routers between pictures and words
    options = Options(search="fsdp", baselines=(), fewer_devices=False)
    strategy = plan_graph(graph, parse_cluster("local:2"), options).stages[0].strategy
    (sort,) = (op for op in graph.ops if op.target == "aten.sort.default")
    assert own_axes(strategy.splits[sort.name]) == (True,)


@pytest.mark.parametrize("by_sorting", [False, True])
def test_every_rank_sorts_its_own_rows(pair, by_sorting):
    graph = captured(by_sorting=by_sorting)
    strategies = strategies_of(graph, (2,))
    assert len(strategies) == 2  # one for each product
    for strategy in strategies.values():
        (sort,) = (op for op in graph.ops if op.target == "aten.sort.default")
        assert own_axes(strategy.splits[sort.name]) == (True,)
    wrong = pair.run(agree, graph, strategies, {"by_sorting": by_sorting}, seconds=100)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


def test_rows_in_orders_of_their_own_and_weights_in_pieces(pool):
    graph = captured()
    strategies = strategies_of(graph, (2, 2))
    assert {tuple(sorted(set(name.split("by ")[1]) & set("ejk"))) for name in strategies} >= {(), ("e",)}
    wrong = pool.run(agree, graph, strategies, {}, seconds=200)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


def test_data_parallelism_leaves_rows_where_they_are():
    graph = captured()
    found = plan_graph(graph, parse_cluster("local:2"), Options("data-parallel", baselines=(), fewer_devices=False))
    handled = [op for op in graph.ops if any(graph.tensors[name].order is not None for name in op.inputs)]
    assert len(handled) > 10
    assert all(OWN in found.stages[0].strategy.splits[op.name] for op in handled)
    gradients = sum(graph.tensors[p.tensor].bytes for p in graph.parameters)
    assert found.prediction.communication_bytes < 1.1 * gradients  # and a number or two


def test_what_reads_counts_of_all_rows_keeps_the_sort_whole():
    graph = captured(counted=True)
    (sort,) = (op for op in graph.ops if op.target == "aten.sort.default")
    described, mesh = describe_graph(graph), mesh_with((2,))
    with pytest.raises(Infeasible):
        find_strategy(described, mesh, within=pinned(lambda op, split: op is not sort or split == (OWN,)))
    assert find_strategy(described, mesh).strategy.splits[sort.name] != (OWN,)


def test_readers_that_are_cut_otherwise_are_refused():
    from shardwright.costs.priced_decisions import PricedDecisions
    from shardwright.program import build

    graph, mesh = captured(), mesh_with((2,))
    strategy = next(iter(strategies_of(graph, (2,)).values()))
    (act,) = (op for op in graph.ops if op.target == "aten.silu.default")
    rows = next(loop for loop in describe_graph(graph).rules[act.name].loops if loop.name != OWN)
    other = Strategy(strategy.axes, {**strategy.splits, act.name: (rows.name,)}, strategy.resting, strategy.kept)
    build(graph, strategy, PricedDecisions(mesh))
    with pytest.raises(LoweringError, match="orders of their own"):
        build(graph, other, PricedDecisions(mesh))


def test_micro_batches_refuse_counts_of_all_rows():
    with pytest.raises(LoweringError, match="sort"):
        microbatches(captured(counted=True), 2)
    assert len(microbatches(captured(), 2).sizes) == 2


class Placed(Experts):
    """What becomes of a row depends on where it is among all: on its ``place``, or on what a second sort makes of it."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).flatten(0, 1)
        _, places = torch.sort(self.router(h)[:, 0], descending=self.by == "descending")
        rows = h[places].tanh()
        if self.by == "place":
            rows = rows * places.unsqueeze(-1).to(rows.dtype)
        elif self.by == "again":
            rows = rows * torch.sort(rows[:, 0])[0].unsqueeze(-1)
        return self.last(rows[torch.argsort(places)]).pow(2).mean()


@pytest.mark.parametrize("by", ["place", "again", "descending"])
def test_rows_that_depend_on_all_others_are_not_sorted_in_pieces(by):
    graph = capture(Placed(by).double(), (torch.randn(4, 6, 5, dtype=torch.float64),))
    first = next(op for op in graph.ops if op.target == "aten.sort.default")
    described, mesh = describe_graph(graph), mesh_with((2,))
    if OWN in described.rules[first.name].by_name:
        with pytest.raises(Infeasible):
            find_strategy(described, mesh, within=pinned(lambda op, split: op is not first or split == (OWN,)))
    with pytest.raises(LoweringError):
        microbatches(graph, 2)


class Returned(Experts):
    """What hangs on a sort is handed out."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(self.router(self.first(x)).flatten())[0]


def test_what_is_handed_out_is_not_sorted_in_pieces():
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    graph = capture(Returned().double(), (x,))
    assert any(op.target == "aten.sort.default" for op in graph.ops)
    assert all(tensor.order is None for tensor in graph.tensors.values())
