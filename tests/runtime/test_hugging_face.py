"""Hugging Face models in their default configurations, caches on, planned by recipe and run against the eager model."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from runtime.workers import built
from shardwright.cluster import parse_cluster
from shardwright.frontend.containers import register_containers
from shardwright.planner import Options, plan_graph
from shardwright.verification.verify import check

pytest.importorskip("transformers")


def recipe_agrees(rank: int, reference: str, search: str) -> None:
    model, args, kwargs, graph = built(reference)
    # A process that captured a call for generation can open caches; what a training step is compared by must not change.
    register_containers(model(*args, **kwargs))
    box = [None]
    if rank == 0:
        options = Options(search=search, baselines=(), fewer_devices=False)
        box = [plan_graph(graph, parse_cluster("local:4"), options).stages[0].strategy]
    dist.broadcast_object_list(box)
    # Every rank brings the graph it captured itself: they must agree.
    answer = check(model, args, kwargs, box[0], steps=2, graph=graph)
    if rank == 0:
        assert model.config.use_cache
        assert answer is not None and answer.agrees, answer.as_dict()


@pytest.mark.parametrize("search", ["megatron", "fsdp"])
def test_gpt2_as_its_configuration_class_makes_it(pool, search):
    pool.run(recipe_agrees, "hf:gpt2:small", search, seconds=120)
