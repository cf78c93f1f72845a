"""Makes the stored plans: by a search, a recipe, or by hand. What is stored stays as it is.

    python -m bench.predictions.making [CASE …]     # plans that are not there yet; those that are there are left alone

A plan file is a fact that predictions are told of, so it is not made again when searches change: the table says what a given
plan does and costs, and the searches beside it say what is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # last: the tests have a folder of the same name as this one

from runtime.pipelines import halves, pipeline_plan  # noqa: E402
from shardwright.cluster import Cluster, mesh_of, parse_cluster, part_of  # noqa: E402
from shardwright.frontend import capture  # noqa: E402
from shardwright.graph import Graph  # noqa: E402
from shardwright.operators.strategy import Strategy  # noqa: E402
from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline, plan_serving  # noqa: E402
from shardwright.planner.dealing_out import with_shares  # noqa: E402
from shardwright.planner.joint import find_pipelines  # noqa: E402
from shardwright.plans import Plan, Stage  # noqa: E402
from shardwright.search.joint.pipelines import JointPlan  # noqa: E402
from shardwright.zoo.reference import resolve  # noqa: E402

from .table import HERE  # noqa: E402 - after the path of the tests' helpers

OWN = str(Path(__file__).parent / "models.py")
UNET = str(ROOT / "bench" / "pipeline_models.py") + ":unet"
GPT = "gpt:small,width=128,seq=64,vocab=512,batch=8"
LLAMA = "llama:small,width=128,seq=64,vocab=512,batch=8"
MOE = "moe:small,width=128,seq=64,vocab=512,batch=8"


@dataclass(frozen=True)
class Made:
    """A plan on one mesh: a model, a cluster, what is searched for."""

    model: str
    cluster: str
    search: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of :func:`resolve`."""

    def graph(self) -> Graph:
        found = resolve(self.model, **self.sizes)
        return capture(found.model, found.args, found.kwargs)

    def plan(self) -> Plan:
        options = {"baselines": (), "fewer_devices": False, **self.options}
        return plan_graph(self.graph(), _cluster(self.cluster), Options(self.search, **options))


@dataclass(frozen=True)
class Shared(Made):
    """Rows dealt out by speed."""

    def plan(self) -> Plan:
        graph, cluster = self.graph(), _cluster(self.cluster)
        options = Options(self.search, baselines=(), fewer_devices=False, **self.options)
        found = with_shares(plan_graph(graph, cluster, options), graph, cluster, options)
        assert found.stages[0].strategy.shares, "no shares were dealt out"
        return found


@dataclass(frozen=True)
class Served(Made):
    """A plan for inference."""

    objective: str = "latency"

    def plan(self) -> Plan:
        options = Options(self.search, baselines=(), fewer_devices=False)

        def at(calls: int) -> Graph:
            batch = self.sizes.get("batch", 4) * calls
            return replace(self, sizes={**self.sizes, "batch": batch, "inference": True}).graph()

        cache = self.sizes.get("cache", 0)
        return plan_serving(at, _cluster(self.cluster), options, objective=self.objective, cache=cache)


@dataclass(frozen=True)
class Staged(Made):
    """A pipeline as asked for."""

    asked: Pipelining = field(default_factory=Pipelining)

    def plan(self) -> Plan:
        options = Options(self.search, **self.options)
        return plan_pipeline(self.graph(), _cluster(self.cluster), self.asked, options)


@dataclass(frozen=True)
class Found(Made):
    """A pipeline of the joint search; ``share``: within this share of the bytes that the fastest takes."""

    share: float = 1.0
    recipe: str = ""

    def plan(self) -> Plan:
        joint = find_pipelines(self.graph(), _cluster(self.cluster), Options(**self.options))
        found: Any = joint.recipes[self.recipe] if self.recipe else joint.best
        if self.share < 1:
            (found,) = joint.under([self.share * max(stage.memory_bytes for stage in found.stages)])
        assert isinstance(found, JointPlan), found
        return joint.deliver(found)


@dataclass(frozen=True)
class ByHand(Made):
    """Equal runs of operators as stages, split at random or along one thing, on CPUs."""

    stages: int = 2
    microbatches: int = 2
    schedule: str = "1f1b"
    each: int = 1
    inside: str = "alone"
    seed: int | None = None
    devices: int | None = None

    def plan(self) -> Plan:
        graph = self.graph()
        made = pipeline_plan(
            graph,
            halves(graph, self.stages),
            self.microbatches,
            self.schedule,
            self.each,
            self.seed,
            self.devices,
            self.inside,
        )
        cluster = _cluster(self.cluster)
        stages = [replace(stage, strategy=_named(stage, cluster)) for stage in made.stages]
        return replace(made, cluster=cluster, captured=graph, stages=tuple(stages))


def _named(stage: Stage, cluster: Cluster) -> Strategy:
    """A stage's strategy on axes that bear the names of the cluster's."""
    axes = mesh_of(part_of(cluster, stage.ranks), stage.strategy.sizes).names
    return replace(stage.strategy, axes=axes)


def _cluster(name: str) -> Cluster:
    """``cpu:N``: N processes on a machine whose figures are written here, so that no machine's own are."""
    if not name.startswith("cpu:"):
        return parse_cluster(name)
    return parse_cluster(str(HERE / f"cpu-{name[4:]}.toml"))


def _recipes() -> dict[str, Made]:
    small = {"max_axes": 1}
    return {
        "recipe-data-parallel": Made(GPT, "4xH100", "data-parallel", small),
        "recipe-fsdp": Made(GPT, "4xH100", "fsdp", small),
        "recipe-fsdp-two-axes": Made(LLAMA, "2x2xA100", "fsdp"),
        "recipe-megatron": Made(GPT, "2x2xH100", "megatron"),
        "recipe-megatron-one-axis": Made(LLAMA, "4xH100", "megatron", small),
        "recipe-megatron-sp": Made(GPT, "4xH100", "megatron-sp", small),
        "recipe-one-weird-trick": Made("alexnet:small", "4xV100", "one-weird-trick", small),
        "recipe-mesh-tensorflow": Made(GPT, "2x2xH100", "mesh-tensorflow"),
        "recipe-zero-1": Made(GPT, "2x2xH100", "zero-1"),
        "recipe-zero-2": Made(GPT, "2x2xH100", "zero-2"),
        "recipe-all-row-greedy": Made(GPT, "4xH100", "all-row-greedy", small),
        "recipe-equal-chop": Made("wresnet50:small", "4xK80", "equal-chop", small),
        "recipe-no-reductions": Made(GPT, "4xH100", "no-reductions", small),
    }


def _one_mesh() -> dict[str, Made]:
    one, three = {"max_axes": 1}, {"max_axes": 3}
    return {
        "found-gpt": Made(GPT, "4xH100"),
        "found-llama": Made(LLAMA, "2x2xA100"),
        "found-moe": Made(MOE, "4xH100"),
        "found-bert": Made("bert:small", "2x2xH100", options=one),
        "found-transformer": Made("transformer:small", "4xH200", options=one),
        "found-least-memory": Made(GPT, "4xH100", "least-memory", one),
        "pinned-head": Made(GPT, "4xH100", options={"pins": ["head=j"], **one}),
        "pinned-layout": Made(GPT, "4xH100", options={"pins": ["blocks.*.feed.up.weight=S0"], **one}),
        "recomputed-fsdp": Made(GPT, "4xH100", "fsdp", {"recompute": "blocks", **one}),
        "recomputed-light-megatron": Made(GPT, "2x2xH100", "megatron", {"recompute": "light"}),
        "recomputed-megatron-sp": Made(LLAMA, "4xH100", "megatron-sp", {"recompute": "blocks", **one}),
        "recomputed-dropout": Made(f"{OWN}:dropping", "4xH100", "data-parallel", {"recompute": "blocks", **one}),
        "shares-gpt": Shared("gpt:small,width=256,seq=256,vocab=512,batch=24", "1xA100+1xH100", "data-parallel"),
        "shares-two-axes": Shared("gpt:small,width=256,seq=256,vocab=512,batch=24", "2xA100+2xH100", "fsdp"),
        "one-device-gpt": Made(GPT, "1xH100"),
        "one-device-convolutions": Made(f"{OWN}:images", "1xA100"),
        "inference-gpt": Served(GPT, "2xH100", sizes={"batch": 4}),
        "inference-cache": Served("hf:gpt2:small", "2xH100", "megatron", sizes={"batch": 4, "cache": 16}),
        "serving-throughput": Served(LLAMA, "4xH100", sizes={"batch": 2}, objective="throughput"),
        "halos-images": Made(f"{OWN}:images", "4xH100", options={"pins": ["layers.3=y0", "layers.6=y0"], **one}),
        "halos-unet": Made(UNET, "2xH100", options={"pins": ["down.0.3=y0", "down.1.0=y1", "up.2.0=y0"], **one}),
        "batch-norm-data-parallel": Made("wresnet50:small", "4xA100", "data-parallel", one),
        "batch-norm-found": Made(f"{OWN}:images", "2x2xH100"),
        "inception-data-parallel": Made("inception:small", "2xH100", "data-parallel"),
        "recurrent-rnnlm": Made("rnnlm:small", "4xH100", "data-parallel", one),
        "recurrent-rnn": Made("rnn:small,seq=4,layers=2", "4xH100", options=one),
        "dropout-fsdp": Made(f"{OWN}:dropping", "4xH100", "fsdp", one),
        "dropout-megatron": Made("gpt:small,dropout=0.1,batch=8", "2x2xH100", "megatron"),
        "three-axes-gpt": Made(GPT, "2x4xH100", "zero-1", three),
        "three-axes-megatron": Made(LLAMA, "2x4xA100", "megatron", three),
        "sorted-rows-fsdp": Made("hf:mixtral:small", "4xH100", "fsdp", one, {"batch": 8}),
        "sorted-rows-found": Made("hf:mixtral:small", "2xH100", sizes={"batch": 8}),
        "vit-megatron": Made(f"{OWN}:vit", "2x2xH100", "megatron"),
        "tied-fsdp": Made(f"{OWN}:tied", "4xH100", "fsdp", one),
        "cpu-fsdp": Made(GPT, "cpu:4", "fsdp", one),
        "cpu-megatron": Made(GPT, "cpu:4", "megatron"),
        "uneven-batch": Made(f"{OWN}:tied", "4xH100", "data-parallel", one, {"batch": 7}),
        "bfloat16-fsdp": Made(LLAMA, "4xH200", "fsdp", one, {"dtype": "bfloat16"}),
        "several-results-fsdp": Made(f"{OWN}:telling", "4xH100", "fsdp", one),
        "sgd-data-parallel": Made(GPT, "4xH100", "data-parallel", {"optimizer": "sgd", **one}),
    }


def _pipelines() -> dict[str, Made]:
    deep = "gpt:small,layers=4,width=128,seq=64,vocab=512,batch=8"
    whole = "data-parallel"

    def staged(schedule: str, stages: int, count: int, cluster: str = "4xH100", search: str = whole) -> Staged:
        return Staged(deep, cluster, search, asked=Pipelining(stages, count, schedule))

    schedules: dict[str, Made] = {
        "schedule-gpipe": staged("gpipe", 4, 4),
        "schedule-1f1b": staged("1f1b", 4, 8),
        "schedule-interleaved-1f1b": staged("interleaved-1f1b", 4, 4, "2xH100"),
        "schedule-breadth-first": staged("breadth-first", 4, 4, "2x2xH100"),
        "schedule-zb-h1": staged("zb-h1", 4, 8),
        "schedule-zb-h2": staged("zb-h2", 4, 8),
        "schedule-zb-v": staged("zb-v", 4, 4, "2xH100"),
        "schedule-v-half": staged("v-half", 4, 4, "2xH100"),
        "schedule-v-min": staged("v-min", 8, 8, "4xH100"),
        "schedule-dualpipe-v": staged("dualpipe-v", 4, 4, "2x2xH100"),
    }
    seeds = {f"random-{n}": _random(n, deep) for n in range(4)}
    return {
        **schedules,
        "stages-on-submeshes": staged("1f1b", 2, 4, "2x2xH100", "megatron"),
        "stages-fsdp": staged("1f1b", 2, 2, "2x2xH100", "fsdp"),
        "stages-zb-h1-fsdp": staged("zb-h1", 2, 4, "2x2xH100", "fsdp"),
        "stages-two-axes": staged("1f1b", 2, 2, "2x4xH100", "megatron"),
        "stages-one-microbatch": staged("1f1b", 2, 1, "2x2xH100", "megatron"),
        "stages-one-microbatch-alone": staged("gpipe", 4, 1),
        "stages-recomputed": Staged(deep, "2x2xH100", "fsdp", {"recompute": "blocks"}, asked=Pipelining(2, 4, "1f1b")),
        "accumulation": staged("1f1b", 1, 4, "4xH100", "fsdp"),
        "unequal-microbatches": Staged(
            f"{OWN}:tied", "4xH100", whole, {}, {"batch": 7}, asked=Pipelining(4, 3, "1f1b")
        ),
        "unequal-zb-h1": Staged(f"{OWN}:tied", "2xH100", whole, {}, {"batch": 7}, asked=Pipelining(2, 3, "zb-h1")),
        "tied-stages": Staged(f"{OWN}:tied", "2x2xH100", whole, asked=Pipelining(2, 4, "1f1b")),
        "tied-dropout-stages": Staged(f"{OWN}:dropping", "4xH100", whole, asked=Pipelining(4, 4, "gpipe")),
        "unlike-stages": staged("1f1b", 2, 4, "1xA100+1xH100"),
        "unlike-stages-cut": staged("gpipe", 2, 4, "2xA100+2xH100", "fsdp"),
        "slow-network": staged("1f1b", 2, 8, "2x1xV100"),
        "batch-norm-per-piece": Staged(
            f"{OWN}:images", "2xH100", whole, asked=Pipelining(2, 2, "1f1b", batch_norm="per-piece")
        ),
        "moe-stages": Staged(MOE + ",layers=4", "4xH100", whole, asked=Pipelining(4, 4, "1f1b")),
        "unet-stages": Staged(UNET, "2xH100", whole, asked=Pipelining(2, 4, "1f1b")),
        "joint-gpt": Found(deep, "2x2xH100"),
        "joint-gpt-less-memory": Found(deep, "2x2xH100", share=0.7),
        "joint-llama": Found("llama:small,layers=4,width=128,seq=64,vocab=512,batch=8", "2x2xA100", share=0.6),
        "joint-megatron-3d": Found(deep, "2x2xH100", recipe="megatron-3d"),
        "cpu-stages": Staged(deep, "cpu:4", whole, asked=Pipelining(2, 4, "1f1b")),
        "cpu-zb-v": Staged(deep, "cpu:4", whole, asked=Pipelining(8, 4, "zb-v")),
        "several-results-stages": Staged(f"{OWN}:telling", "2xH100", whole, asked=Pipelining(2, 4, "1f1b")),
        **seeds,
    }


def _random(seed: int, model: str) -> ByHand:
    schedule, stages = [("1f1b", 2), ("zb-h1", 2), ("zb-v", 4), ("interleaved-1f1b", 4)][seed]
    return ByHand(model, "cpu:4", stages=stages, schedule=schedule, each=2, seed=seed, devices=2)


CASES: dict[str, Made] = {**_recipes(), **_one_mesh(), **_pipelines()}


def main(names: Sequence[str], make: Callable[[Made], Plan] = lambda made: made.plan()) -> int:
    failed = 0
    for name in names or CASES:
        path = HERE / "plans" / f"{name}.json"
        if path.exists():
            continue
        try:
            plan = make(CASES[name])
        except Exception as error:  # the next ones are made all the same; the list says which are missing
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            failed += 1
            continue
        replace(plan, candidates=(), model="", notes=()).save(path)
        shape = (
            f"{len(plan.stages)} stages × {plan.microbatches}" if not plan.whole else str(plan.stages[0].strategy.axes)
        )
        print(f"{name}: {path.stat().st_size / 1e3:.1f} kB, {shape}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
