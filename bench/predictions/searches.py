"""Searches whose answers are in the table: models by which planners are judged, few blocks deep, on clusters of presets.

Nothing here depends on how long anything takes: time limits are far away, orders of passes are named, not searched for.
``SLOW`` are those that the test suite leaves to ``make predictions``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, Pipelining, plan_graph, plan_jointly, plan_pipeline, plan_serving
from shardwright.plans import Plan
from shardwright.zoo.reference import resolve

from .rows import Row, search_row

OWN = str(Path(__file__).parent / "models.py")
FAR = 3600.0
"""Seconds that no search here takes."""

GPT = "gpt:layers=2,width=1024,heads=16,seq=512,vocab=8192,batch=32"
LLAMA = "llama:layers=2,width=2048,heads=16,kv_heads=4,inner=5632,seq=1024,vocab=16384,batch=16"
MOE = "moe:layers=1,width=1024,heads=16,kv_heads=4,inner=3584,seq=512,vocab=8192,batch=16"
BERT = "bert:layers=2,batch=32,seq=256,vocab=8192"
RESNET = "wresnet50:width=2,batch=64"
RNN = "rnn:seq=3,layers=2,width=2048,batch=256,vocab=4096"
RNNLM = "rnnlm:vocab=16384,width=1024"
ALEXNET = "alexnet"
VIT, PERCEPTRON, IMAGES = f"{OWN}:vit_base", f"{OWN}:wide_perceptron", f"{OWN}:images"
DEEP = "gpt:layers=4,width=1024,heads=16,seq=512,vocab=8192,batch=16"


@dataclass(frozen=True)
class Search:
    """One search: on one mesh (``flat``), for an asked pipeline, jointly, or for serving."""

    model: str
    cluster: str
    search: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    asked: Pipelining | None = None
    joint: bool = False
    serving: str = ""

    def plan(self) -> Plan:
        given = {"baselines": (), "fewer_devices": False, **self.options}
        options, cluster = Options(self.search, time_limit=FAR, **given), parse_cluster(self.cluster)
        if self.serving:
            return plan_serving(
                lambda calls: captured(self.model, True, calls), cluster, options, objective=self.serving
            )
        graph = captured(self.model)
        if self.asked is not None:
            return plan_pipeline(graph, cluster, self.asked, options)
        return plan_jointly(graph, cluster, options)[0] if self.joint else plan_graph(graph, cluster, options)


@cache
def captured(model: str, inference: bool = False, calls: int = 0) -> Graph:
    """A model's graph, once for all searches on it; ``calls`` of 2 rows each."""
    found = resolve(model, inference=inference, batch=2 * calls or None)
    return capture(found.model, found.args, found.kwargs)


def _flat() -> dict[str, Search]:
    one, three = {"max_axes": 1}, {"max_axes": 3}
    return {
        "gpt-8xH100": Search(GPT, "8xH100", options=one),
        "gpt-2x8xA100": Search(GPT, "2x8xA100"),
        "gpt-one-axis-2x8xH100": Search(GPT, "2x8xH100", options=one),
        "gpt-default-4xH100": Search(GPT, "4xH100", options={"fewer_devices": True, "baselines": ("fsdp", "megatron")}),
        "gpt-data-parallel-8xH100": Search(GPT, "8xH100", "data-parallel"),
        "gpt-fsdp-2x8xA100": Search(GPT, "2x8xA100", "fsdp"),
        "gpt-megatron-8xH100": Search(GPT, "8xH100", "megatron"),
        "gpt-megatron-sp-2x8xH100": Search(GPT, "2x8xH100", "megatron-sp"),
        "gpt-zero-1-2x8xA100": Search(GPT, "2x8xA100", "zero-1"),
        "gpt-zero-2-8xB200": Search(GPT, "8xB200", "zero-2"),
        "gpt-no-reductions-8xH100": Search(GPT, "8xH100", "no-reductions", one),
        "gpt-all-row-greedy-8xH100": Search(GPT, "8xH100", "all-row-greedy", one),
        "gpt-equal-chop-4xH100": Search(GPT, "4xH100", "equal-chop", one),
        "gpt-least-memory-8xA100": Search(GPT, "8xA100", "least-memory", one),
        "gpt-pinned-8xH100": Search(GPT, "8xH100", options={"pins": ["head=j"], **one}),
        "gpt-forbidden-8xH100": Search(GPT, "8xH100", options={"forbidden": ["blocks.*@gpu"], **one}),
        "gpt-recomputed-fsdp-8xA100": Search(GPT, "8xA100", "fsdp", {"recompute": "blocks"}),
        "gpt-little-memory-8xA100": Search(GPT, "8xA100", "fsdp", {"memory_limit": 6e8, **one}),
        "gpt-some-recomputed-4xA100": Search(DEEP, "4xA100", "data-parallel", {"memory_limit": 1.7e9}),
        "gpt-some-recomputed-lightly-4xA100": Search(DEEP, "4xA100", "data-parallel", {"memory_limit": 1.5e9}),
        "gpt-three-axes-2x8xH100": Search(GPT, "2x8xH100", "megatron", three),
        "gpt-slow-devices-8xV100": Search(GPT, "8xV100", "megatron"),
        "llama-8xH100": Search(LLAMA, "8xH100", options=one),
        "llama-fsdp-2x8xH200": Search(LLAMA, "2x8xH200", "fsdp"),
        "llama-megatron-sp-8xH200": Search(LLAMA, "8xH200", "megatron-sp"),
        "llama-megatron-2x8xA100": Search(LLAMA, "2x8xA100", "megatron"),
        "llama-2x8xA100": Search(LLAMA, "2x8xA100"),
        "llama-deep-8xH100": Search(LLAMA.replace("layers=2", "layers=24"), "8xH100", options=one),
        "moe-2x4xH200": Search(MOE, "2x4xH200"),
        "moe-4xH100": Search(MOE, "4xH100", options=one),
        "moe-fsdp-2x8xA100": Search(MOE, "2x8xA100", "fsdp"),
        "vit-8xA100": Search(VIT, "8xA100", options=one),
        "vit-fsdp-8xH100": Search(VIT, "8xH100", "fsdp"),
        "vit-2x8xH100": Search(VIT, "2x8xH100"),
        "bert-2x4xA100": Search(BERT, "2x4xA100", options={"fewer_devices": True, "baselines": ("fsdp", "zero-1")}),
        "bert-megatron-8xA100": Search(BERT, "8xA100", "megatron"),
        "bert-zero-1-2x8xV100": Search(BERT, "2x8xV100", "zero-1"),
        "resnet-4xV100": Search(RESNET, "4xV100", options=one),
        "resnet-data-parallel-2x8xA100": Search(RESNET, "2x8xA100", "data-parallel"),
        "alexnet-8xV100": Search(ALEXNET, "8xV100"),
        "alexnet-one-weird-trick-8xV100": Search(ALEXNET, "8xV100", "one-weird-trick"),
        "rnn-4xH100": Search(RNN, "4xH100", options=one),
        "rnn-data-parallel-8xK80": Search(RNN, "8xK80", "data-parallel"),
        "rnnlm-8xH100": Search(RNNLM, "8xH100"),
        "perceptron-2x8xH100": Search(PERCEPTRON, "2x8xH100"),
        "perceptron-megatron-8xB200": Search(PERCEPTRON, "8xB200", "megatron"),
        "images-4xH100": Search(IMAGES, "4xH100"),
        "perceptron-unlike": Search(PERCEPTRON, "1xA100+1xH100", "data-parallel", joint=True),
    }


def _others() -> dict[str, Search]:
    return {
        "gpt-inference-4xH100": Search(GPT, "4xH100", serving="latency", options={"max_axes": 1}),
        "perceptron-throughput-4xH100": Search(PERCEPTRON, "4xH100", serving="throughput"),
        "gpt-pipeline-1f1b-2x2xH100": Search(DEEP, "2x2xH100", "fsdp", asked=Pipelining(2, 4, "1f1b")),
        "gpt-pipeline-zb-h1-4xA100": Search(DEEP, "4xA100", "data-parallel", asked=Pipelining(4, 8, "zb-h1")),
        "perceptron-pipeline-8xH100": Search(PERCEPTRON, "8xH100", "megatron", asked=Pipelining(2, 4, "1f1b")),
        "llama-joint-2x4xA100": Search(LLAMA.replace("layers=2", "layers=8"), "2x4xA100", joint=True),
        "gpt-joint-little-memory-4xV100": Search(
            DEEP, "4xV100", joint=True, options={"memory_limit": 1e9, "max_axes": 1}
        ),
        "gpt-joint-2x2xH100": Search(DEEP, "2x2xH100", joint=True, options={"max_axes": 1}),
        "perceptron-joint-unlike": Search(PERCEPTRON, "1xA100+1xH100", joint=True),
    }


SEARCHES: Mapping[str, Search] = {**_flat(), **_others()}
SLOW = frozenset(
    (
        "gpt-joint-2x2xH100",
        "images-4xH100",
        "llama-deep-8xH100",
        "llama-joint-2x4xA100",
        "moe-2x4xH200",
        "resnet-4xV100",
        "rnnlm-8xH100",
        "vit-2x8xH100",
    )
)
"""Searches that take more than two seconds each."""


def searched(name: str, plan: Callable[[Search], Plan] = Search.plan) -> Row:
    """The row of a search."""
    return search_row(name, plan(SEARCHES[name]))
