"""What is fuzzed: each target makes a good document once, and runs a command (or a reader) on a damaged copy of it."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import pickle
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from fuzz.mutations import NUMBERS, WORDS, changed, deepened, torn
from shardwright.errors import ShardwrightError

CANARY = """
from pathlib import Path
Path(__file__).with_suffix(".ran").write_text("yes")
def build():
    raise SystemExit
"""


@dataclass(frozen=True)
class Target:
    """``draw`` says what a case is made of, ``run`` runs it in a folder of its own; ``share`` of all the cases."""

    name: str
    share: float
    draw: Any
    run: Callable[[Path, Any], None]
    prepare: Callable[[], Any] = lambda: None


def command(*arguments: str) -> None:
    """``shardwright ARGUMENTS`` in this process; its output is looked at by nobody."""
    from shardwright.cli import app

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app(list(arguments), standalone_mode=True)


@cache
def _plan(staged: bool) -> tuple[Any, Any]:
    """A plan's document (of a pipeline, where it is to be one), and its graph opened."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.graph import to_json as graph_json
    from shardwright.planner import Options, Pipelining, plan, plan_pipeline
    from shardwright.plans import to_json

    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
        )
        if staged:
            options = Options(search="data-parallel")
            captured = capture(model, (torch.empty(8, 16),))
            made = plan_pipeline(captured, parse_cluster("4xH100"), Pipelining(2, 2, "zb-h1"), options)
        else:
            made = plan(model, (torch.empty(8, 16),), cluster="2xH100", baselines=())
    document = json.loads(to_json(made))
    document["model"] = "canary.py:build"
    return document, json.loads(graph_json(made.graph()))


PLAN_COMMANDS = (
    ("explain", "plan.json"),
    ("explain", "plan.json", "*", "--json"),
    ("explain", "plan.json", "--memory"),
    ("simulate", "plan.json", "--json"),
    ("simulate", "plan.json", "--microbatches", "4"),
    ("explain", "plan.json", "--program", "--rank", "1"),
    ("report", "plan.json", "-o", "plan.svg"),
    ("report", "plan.json", "-o", "plan.html", "--why-seconds", "0.1"),
    ("diff", "plan.json", "plan.json", "--json"),
    ("plan", "plan.json", "--json", "--time-limit", "1"),
)


def _run_plan(folder: Path, drawn: Any) -> None:
    staged, inside, changes, tear, which = drawn
    document, graph = _plan(staged)
    (folder / "canary.py").write_text(CANARY)
    if inside:  # deep into the graph, past the checks of the file around it
        from shardwright.graph import fingerprint, from_json

        graph = changed(graph, changes)
        text = deepened(json.dumps(graph))
        packed = base64.b64encode(zlib.compress(text)).decode()
        document = {**document, "graph": packed}
        with contextlib.suppress(ShardwrightError):
            document["signature"] = {**document["signature"], "fingerprint": fingerprint(from_json(text.decode()))}
    else:
        document = changed(document, changes)
    (folder / "plan.json").write_bytes(torn(deepened(json.dumps(document)), tear))
    os.chdir(folder)
    try:
        command(*which)
    finally:
        assert not (folder / "canary.ran").exists(), "the plan's Python file was run"


@cache
def _trace(staged: bool) -> Any:
    """A recorded step of rank 0 of the plan, as torch.profiler writes it."""
    from shardwright.plans import from_json
    from shardwright.program.naming import closing_name, pass_name

    plan = from_json(json.dumps(_plan(staged)[0]))
    names = ["instruction 0: forward operator linear", "instruction 9: backward weight linear", "Optimizer.step#AdamW"]
    if not plan.whole:
        names = [pass_name(action) for action in plan.schedule.orders[0]] + [closing_name(0), names[-1]]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "tid": 1, "ts": 10.0 * n, "dur": 9.0, "args": {}}
        for n, name in enumerate(names)
    ]
    inside = ["instruction 3: forward operator linear", "aten::linear", "c10d::allreduce_", "gloo:all_reduce"]
    events += [
        {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": 1.0 + n, "dur": 0.5, "args": {"Sequence number": n}}
        for n, (name, cat) in enumerate(zip(inside, ["user_annotation", *["cpu_op"] * 3], strict=True))
    ]
    return {"baseTimeNanoseconds": 1_700_000_000, "traceEvents": events}


def _run_trace(folder: Path, drawn: Any) -> None:
    staged, changes, tear = drawn
    (folder / "plan.json").write_text(json.dumps(_plan(staged)[0]))
    (folder / "trace.json").write_bytes(torn(deepened(json.dumps(changed(_trace(staged), changes))), tear))
    os.chdir(folder)
    command("report", "plan.json", "--why-seconds", "0", "--measured", "trace.json")


@cache
def _cluster() -> Any:
    from shardwright.cluster import cluster_to_toml, parse_cluster, toml_text

    document = toml_text.loads(cluster_to_toml(parse_cluster("2x2xH100")))
    document["group"][0]["device"].pop("profile", None)
    curve = {"features": ["m", "n", "k"], "points": [[8, 8, 8], [64, 64, 64]], "ratios": [4.0, 1.5]}
    document["group"][0]["device"]["profile"] = {
        "label": "measured",
        "kernel_floor": 1e-6,
        "dispatch": {"add": [1e-6, 2e-6]},
        "optimizer": {"adamw/float32": [1e-5, 1e-6, 1e-12]},
        "curves": {"matmul/float32/forward": curve},
    }
    return document


def _run_cluster(folder: Path, drawn: Any) -> None:
    from shardwright.cluster import toml_text

    changes, tear, verb = drawn
    try:
        text = toml_text.dumps(changed(_cluster(), changes))
    except (TypeError, RecursionError, AttributeError):
        text = "a = " + "[" * 5000
    (folder / "c.toml").write_bytes(torn(deepened(text), tear))
    command("clusters", str(folder / "c.toml"), *verb)


CLUSTER_OPTIONS = ((), ("--json",), ("--toml",))
CHOICE = {
    "problem": {
        "name": "fuzzed",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150], [0, 60]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95], [1, 2, 3]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15], [5, 1, 9]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4], [5, 2]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60], [1, 2, 3, 4, 5, 6, 7, 8, 9]],
        },
        "usage_limit": 50,
    }
}


def _run_choose(folder: Path, drawn: Any) -> None:
    changes, tear, method = drawn
    path = folder / "problem.json"
    path.write_bytes(torn(deepened(json.dumps(changed(CHOICE, changes))), tear))
    command("choose", str(path), "--time-limit", "1", "--method", method)


METHODS = ("auto", "limited", "integer", "brute", "eliminate", "markov")


LATENCIES = {"supportedOnFpga": True, "cpuLatency": 9.0, "fpgaLatency": 1.0, "size": 10.0}
WORKLOAD = {
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "maxSizePerFPGA": 100.0,
    "nodes": [{"id": i, **LATENCIES, "isBackwardNode": i > 5, "colorClass": i % 6} for i in range(10)],
    "edges": [{"sourceId": i, "destId": i + 1, "cost": 0.5} for i in range(9)],
}
KINDS = {
    "kinds": [{"name": "fast", "count": 2, "memory": 50.0}, {"name": "host", "count": 1, "host": True}],
    "nodes": [{"id": str(i), "times": [1.0 + i, None if i == 3 else 4.0], "size": 5.0} for i in range(6)],
    "edges": [
        {"sourceId": str(i), "destId": str(j), "cost": 0.1} for i in range(6) for j in range(i + 1, 6) if (i + j) % 2
    ],
}
PLACE_OPTIONS = (
    (), ("--solver", "heuristic"), ("--noncontiguous",), ("--objective", "latency"), ("--replicate",), ("--overlap",),
    ("--solver", "local-search"), ("--objective", "latency", "--solver", "greedy"), ("--separate-passes",),
)  # fmt: skip


def _compile_choosing() -> None:
    """Kernels are compiled once, and not on a case's time."""
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            with contextlib.suppress(SystemExit, ShardwrightError):
                _run_choose(Path(folder), ([], ("whole", 0.0, b""), method))


def _compile_placing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for base, options in itertools.product((WORKLOAD, KINDS), PLACE_OPTIONS):
            with contextlib.suppress(SystemExit, ShardwrightError):
                _run_place(Path(folder), (base, [], ("whole", 0.0, b""), options))


def _run_place(folder: Path, drawn: Any) -> None:
    base, changes, tear, options = drawn
    path = folder / "workload.json"
    path.write_bytes(torn(deepened(json.dumps(changed(base, changes))), tear))
    command("place", str(path), "--time-limit", "0.3", "--json", *options)


class _Calls:
    """Pickles as a call of a function: what an attacker writes."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@cache
def _checkpoint() -> tuple[bytes, bytes, Any]:
    """The metadata, the one shard and the checksums of a small checkpoint."""
    from shardwright.runtime.checkpoint import save_checkpoint
    from shardwright.runtime.checkpoint_sums import FILE

    model = torch.nn.Linear(4, 4)
    with tempfile.TemporaryDirectory() as folder:
        made = save_checkpoint(folder, 1, model)
        (shard,) = made.glob("*.distcp")
        return (made / ".metadata").read_bytes(), shard.read_bytes(), json.loads((made / FILE).read_text())


def _run_checkpoint(folder: Path, drawn: Any) -> None:
    from shardwright.runtime.checkpoint import load_checkpoint
    from shardwright.runtime.checkpoint_reading import read_metadata
    from shardwright.runtime.checkpoint_sums import FILE

    what, tear, shard_tear, where, value = drawn
    metadata, shard, sums = _checkpoint()
    place = folder / "run" / "step-1"
    place.mkdir(parents=True)
    (place / "__0_0.distcp").write_bytes(torn(shard, shard_tear))
    (place / ".metadata").write_bytes(metadata)
    if what == "torn":
        (place / ".metadata").write_bytes(torn(metadata, tear))
    else:
        data = read_metadata(place)
        if what == "calls":
            data.planner_data = _Calls(os.system, (f"touch {folder}/ran",))
        elif what == "entry":
            names = sorted(data.state_dict_metadata)
            data.state_dict_metadata[names[int(where * len(names))]] = value
        else:
            index = list(data.storage_data)[int(where * len(data.storage_data))]
            setattr(data.storage_data[index], ("relative_path", "offset", "length")[int(where * 997) % 3], value)
        (place / ".metadata").write_bytes(pickle.dumps(data))
    about = (place / ".metadata").read_bytes()
    # Where something is torn the checksums notice it; who writes other metadata writes its checksum too.
    (place / FILE).write_text(json.dumps(sums if where < 0.3 else {**sums, "metadata": zlib.crc32(about)}))
    try:
        load_checkpoint(folder / "run", torch.nn.Linear(4, 4))
    finally:
        assert not (folder / "ran").exists(), "the checkpoint ran a command"


@cache
def _kept() -> tuple[Any, str]:
    from shardwright.cluster import toml_text
    from shardwright.cluster.local import quick_figures
    from shardwright.cluster.serial import device_to, link_to

    device, link = quick_figures(2)
    table = toml_text.loads(toml_text.dumps({"device": device_to(device), "link": link_to(link)}))
    record = {
        "target": "aten.hypot.default",
        "origin": "probed",
        "reason": "",
        "loops": [["p1", 8, ["S0", "S0"], ["S0"]]],
    }
    return table, json.dumps(record)


def _run_cache(folder: Path, drawn: Any) -> None:
    from shardwright.cluster import parse_cluster, toml_text
    from shardwright.cluster.local import cores
    from shardwright.graph import Op, Ref, Tensor
    from shardwright.operators import probing

    changes, tear = drawn
    os.environ["SHARDWRIGHT_CACHE"] = str(folder)
    table, record = _kept()
    try:
        text = toml_text.dumps(changed(table, changes))
    except (TypeError, RecursionError, AttributeError):
        text = "a = " + "[" * 5000
    place = folder / f"local-2-of-{cores()}-cores.toml"
    place.write_bytes(torn(deepened(text), tear))
    place.chmod(0o600)
    assert parse_cluster("local:2").size == 2
    tensors = {name: Tensor(name, (8, 4), "float32") for name in "xyz"}
    op = Op("op", "aten.hypot.default", (Ref("x"), Ref("y")), (), ("z",))
    (folder / probing.KIND).mkdir(mode=0o700)
    place = folder / probing.KIND / f"{probing._key(op, tensors)}.json"
    place.write_bytes(torn(deepened(json.dumps(changed(json.loads(record), changes))), tear))
    place.chmod(0o600)
    rules = probing._believed(probing._key(op, tensors), op, tensors)
    for loop in rules.loops if rules is not None else ():
        assert len(loop.inputs) == 2 and len(loop.outputs) == 1


ODD = ["local:2x", "9xH100", "H100", "0xH100", "x", "hf:", "gpt:", "gpt:layers=1e9", "nothing.py:f", ".json", "~", "-"]
SPEAKABLE = [word for word in WORDS if "\0" not in word and "\ud800" not in word]
TOKENS = st.one_of(
    st.sampled_from([str(number) for number in NUMBERS]),
    st.sampled_from(SPEAKABLE),
    st.sampled_from(ODD),
    st.text(max_size=8).filter(lambda text: "\0" not in text and text.isprintable()),
)
SMALL = ("plan", "gpt:small", "--cluster", "2xH100")
VERBS = (
    *((verb,) for verb in ("clusters", "explain", "choose", "place", "simulate", "report", "run")),
    *(("clusters", "--json"), ("ops", "--json"), ("plan", "--cluster"), SMALL[:3], ()),
    *((*SMALL, option) for option in ("--memory", "--pin", "--search", "--time-limit", "--batch", "--forbid")),
    *(("place", "--time-limit"), ("choose", "x.json", "--method"), ("verify", "--steps")),
    ("calibrate", "nowhere", "--seconds"),  # so that a number that means something ends there
    *((*SMALL, "--stages", "2", option) for option in ("--microbatches", "--schedule", "--cut")),
    (*SMALL, "--stages", "2", "--html", "nowhere/plan.html"),  # where it could be written, there would be a search
    *((*SMALL, "--stages"), ("schedule", "--stages"), ("schedule", "--microbatches"), ("diff",)),
)


def _run_words(folder: Path, drawn: Any) -> None:
    verb, words = drawn
    os.chdir(folder)
    if verb[:4] == SMALL and (not words or words[0].strip() in ("0.5", "1", "2", "3", "7", "1e+18", "1e+300")):
        words = ["nan"]  # a whole search is no case for a fuzzer
    command(*verb, *words)
