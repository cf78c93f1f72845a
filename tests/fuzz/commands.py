"""Targets for whole commands: every option of every command with odd values, model names and the files only they read."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from fuzz.mutations import CHANGES, NUMBERS, TORN, WORDS, changed, deepened, torn
from fuzz.targets import _compile_choosing, _compile_placing, _plan, command
from shardwright.errors import ShardwrightError

TINY = """
import torch

def build(batch=8):
    return torch.nn.Sequential(torch.nn.Linear(16, 8)), (torch.empty(batch, 16),), {}
"""
SPEAKABLE = [word for word in WORDS if "\0" not in word and "\ud800" not in word]
MEANT = (
    "S0",
    "R",
    "S0,R",
    "0.weight=S0",
    "0*=R",
    "linear@gpu",
    "x=",
    "=S0",
    "@gpu",
    "gpu=2",
    "gpu=nan",
    "1,2,3",
    "8..512",
)
MEANT += (
    "auto",
    "none",
    "fsdp",
    "megatron",
    "1f1b",
    "zb-v",
    "float64",
    "sgd",
    "local:2",
    "2xH100",
    "plan.json",
    "tiny.py",
)
VALUE = st.one_of(
    st.sampled_from([str(number) for number in NUMBERS]),
    st.sampled_from(SPEAKABLE),
    st.sampled_from(MEANT),
    st.text(max_size=8).filter(lambda text: "\0" not in text and text.isprintable()),
)

# Options of each command; what stands before them is a call that means something.
CALLS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("plan", "tiny.py:build", "--cluster", "2xH100", "--time-limit", "1"): (
        *("--batch", "--seq", "--search", "--optimizer", "--dtype", "--max-axes", "--pin", "--forbid", "--memory"),
        *(
            "--recompute",
            "--stages",
            "--microbatches",
            "--schedule",
            "--cut",
            "--batch-norm",
            "--time-limit",
            "--output",
        ),
        *("--html", "--devices", "--price", "--inference --objective", "--inference --cache", "--cluster"),
    ),
    ("plan", "plan.json", "--time-limit", "1"): ("--pin", "--forbid", "--memory", "--max-axes", "--cluster", "--batch"),
    ("fits", "tiny.py:build", "--cluster", "2xH100"): (
        *("--batch", "--seq", "--dtype", "--like", "--search", "--optimizer", "--memory", "--cluster"),
    ),
    ("verify", "tiny.py:build"): (
        *(
            "--cluster",
            "--search",
            "--plan",
            "--batch",
            "--seq",
            "--steps",
            "--dtype",
            "--inference --cache",
            "--seconds",
        ),
    ),
    ("run", "plan.json"): (
        *("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--max-restarts", "--profile", "--assist"),
        "--elastic --nnodes",
    ),
    ("explain", "plan.json"): ("", "--program --rank", "--model"),
    ("simulate", "plan.json"): (
        "--trace",
        "--link-rate",
        "--device-speed",
        "--host-speed",
        "--microbatches",
        "--width",
    ),
    ("report", "plan.json", "--why-seconds", "0"): ("--output", "--price", "--why-seconds", "--verified", "--measured"),
    ("diff", "plan.json"): ("", "plan.json --html"),
    ("schedule", "--time-limit", "0.2", "--stages", "4", "--microbatches", "6"): (
        *("--stages", "--microbatches", "--schedule", "--devices", "--shape", "--forward", "--backward", "--weight"),
        *("--hop", "--memory", "--forward-memory", "--backward-memory", "--sizes", "--objective", "--time-limit"),
        *("--csv", "--trace", "--width"),
    ),
    ("place", "workload.json", "--time-limit", "0.2"): (
        *(
            "--objective",
            "--solver",
            "--subgraphs",
            "--objective latency --subgraphs",
            "--batch",
            "--devices",
            "--cluster",
        ),
        *("--bandwidth", "--time-limit"),
    ),
    ("place", "tiny.py:build", "--cluster", "2xH100", "--time-limit", "0.2"): ("--batch", "--solver", "--cluster"),
    ("choose", "choice.json", "--time-limit", "0.2"): ("--time-limit", "--method", "--seed"),
    ("calibrate",): ("", "--seconds", "--output", "--raw"),
    ("tour", "--yes", "--folder", "tour"): ("--model", "--cluster", "--folder"),
    ("ops",): ("", "--coverage --model", "--coverage --model nothing --write"),
    ("clusters",): ("",),
    ("models",): ("",),
    ("doctor", "--no-processes"): ("",),
    ("cache",): ("",),
}
OPTIONS = tuple((call, option) for call, options in CALLS.items() for option in options)


class BegunError(ShardwrightError):
    """Work that is no case for a fuzzer was about to begin: everything given was understood."""


def _begin(*args: Any, **kwargs: Any) -> None:
    raise BegunError("This is where the work begins.")


@contextlib.contextmanager
def nothing_started() -> Any:
    """Processes, measurements and whole verifications are not started; what leads there is run as it is."""
    import torch.distributed.run

    import shardwright.cluster.calibrate
    import shardwright.verification

    with (
        mock.patch.object(shardwright.verification, "verify", _begin),
        mock.patch.object(torch.distributed.run, "main", _begin),
        mock.patch.object(shardwright.cluster.calibrate, "run", _begin),
        mock.patch.object(shardwright.cluster.calibrate, "ensure_local", lambda *args, **kwargs: None),
        mock.patch.object(sys.modules["shardwright.cli.tour"], "plan_command", _begin),
    ):
        yield


@cache
def _files() -> dict[str, str]:
    from fuzz.targets import CHOICE, WORKLOAD

    return {
        "tiny.py": TINY,
        "plan.json": json.dumps({**_plan(False)[0], "model": "tiny.py:build"}),
        "workload.json": json.dumps(WORKLOAD),
        "choice.json": json.dumps(CHOICE),
        "script.py": "raise SystemExit",
    }


def run_options(folder: Path, drawn: Any) -> None:
    (call, option), values, more = drawn
    for name, text in _files().items():
        (folder / name).write_text(text)
    os.chdir(folder)
    if call[0] == "cache":  # which may be cleared
        os.environ["SHARDWRIGHT_CACHE"] = str(folder / "cache")
    words = [*call, *option.split(), *values]
    if call[0] == "run":
        words += ["--", "script.py"]
    elif more and option.startswith("--"):
        words += ["--json"]
    paths, modules = list(sys.path), set(sys.modules)
    try:
        with nothing_started():
            command(*words)
    finally:
        sys.path[:] = paths
        for name in set(sys.modules) - modules:
            if name == "tiny":
                del sys.modules[name]


SIZES = (
    "layers",
    "width",
    "heads",
    "kv_heads",
    "vocab",
    "seq",
    "batch",
    "inner",
    "experts",
    "image",
    "channels",
    "classes",
)
SIZES += ("head_width", "hidden", "dropout", "top_k", "nothing")
ZOO = ("gpt", "llama", "bert", "moe", "transformer", "rnn", "rnnlm", "alexnet", "inception", "wresnet50")
HUGE = [*NUMBERS, 1000, 10_000, 10**9, 2**31 - 1, "true", "none", "x"]
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16,
    "vocab_size": 32, "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1,
}  # fmt: skip
FIELDS = ("n_layer", "n_embd", "n_head", "vocab_size", "num_hidden_layers", "hidden_size", "n_positions")


def run_models(folder: Path, drawn: Any) -> None:
    """Build a model by a name with odd sizes, or from a damaged configuration, and look at a plan of another with it."""
    kind, name, sizes, changes, tear = drawn
    os.chdir(folder)
    (folder / "plan.json").write_text(_files()["plan.json"])
    if kind == "zoo":
        given = ",".join(f"{SIZES[int(where * len(SIZES))]}={value}" for where, value in sizes)
        reference = f"{name}:small,{given}"
    elif kind == "hf":
        given = ",".join(f"{FIELDS[int(where * len(FIELDS))]}={value}" for where, value in sizes)
        reference = f"hf:gpt2:small,{given}"
    else:
        (folder / "config.json").write_bytes(torn(deepened(json.dumps(changed(CONFIG, changes))), tear))
        reference = "hf:config.json"
    command("explain", "plan.json", "--model", reference)


def prepare_options() -> None:
    """Plans are made and kernels compiled once, and not on a case's time."""
    from shardwright.schedules import pipeline
    from shardwright.search.schedule import find_schedule

    _files()
    find_schedule(pipeline((0, 1), 2), time_limit=0.2)
    _compile_placing()
    _compile_choosing()


@cache
def _orders() -> str:
    from shardwright.schedules import known_schedule

    rows = known_schedule("zb-h1", 3, 4).orders
    return "\n".join(",".join(map(str, row)) for row in rows)


CELLS = (
    "",
    "0F0",
    "9F9",
    "999999999F0",
    "0F99999999999",
    "1I0",
    "0W0",
    "-1F0",
    "(0F4;3B2)OVERLAP_F_B",
    "2SEND_F0",
    "F",
    "²F0",
    '"',
)


def run_schedule(folder: Path, drawn: Any) -> None:
    places, tear, options = drawn
    rows = [line.split(",") for line in _orders().splitlines()]
    for row, column, cell in places:
        line = rows[int(row * len(rows))]
        line[int(column * len(line))] = cell
    text = "\n".join(map(",".join, rows))
    (folder / "orders.csv").write_bytes(torn(text.encode(), tear))
    os.chdir(folder)
    command("schedule", "--schedule", "orders.csv", *options)


def _line(name: str, what: str, forward: float, backward: float, activation: str, parameters: float) -> str:
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return f"{name} -- {what} -- {times}, activation_size={activation}, parameter_size={parameters}"


PROFILE = "\n".join(
    [
        _line("node1", "Input0", 0.0, 0.0, "0.0", 0.0),
        _line("node2", "Linear(in=4, out=4)", 1.5, 2.5, "64.0", 80.0),
        _line("node3", "ReLU()", 0.5, 0.5, "[64.0; 64.0]", 0.0),
        _line("node4", "Linear(in=4, out=4)", 1.5, 2.5, "64.0", 80.0),
        *("\tnode1 -- node2", "\tnode2 -- node3", "\tnode3 -- node4", ""),
    ]
)


def run_profile(folder: Path, drawn: Any) -> None:
    swaps, tear, options = drawn
    words = PROFILE.split(" ")
    for where, value in swaps:
        place = int(where * len(words))
        before, sign, _ = words[place].rpartition("=")
        words[place] = f"{before}{sign}{value}"
    (folder / "graph.txt").write_bytes(torn(" ".join(words).encode("utf-8", "replace"), tear))
    command("place", str(folder / "graph.txt"), "--time-limit", "0.2", "--json", *options)


VERDICT = {"agrees": True, "runs": [{"name": "found", "dtype": "float64", "worst": 1e-12, "agrees": True}]}


def run_verdict(folder: Path, drawn: Any) -> None:
    changes, tear = drawn
    (folder / "plan.json").write_text(_files()["plan.json"])
    (folder / "verdict.json").write_bytes(torn(deepened(json.dumps(changed(VERDICT, changes))), tear))
    os.chdir(folder)
    command("report", "plan.json", "--why-seconds", "0", "--verified", "verdict.json")


SHARE = st.floats(0, 1, exclude_max=True)
DRAW_OPTIONS = st.tuples(st.sampled_from(OPTIONS), st.lists(VALUE, min_size=0, max_size=2), st.booleans())
DRAW_MODELS = st.tuples(
    st.sampled_from(["zoo", "zoo", "zoo", "hf", "config"]),
    st.sampled_from(ZOO),
    st.lists(st.tuples(SHARE, st.sampled_from(HUGE)), min_size=1, max_size=2),
    CHANGES,
    TORN,
)
DRAW_SCHEDULES = st.tuples(
    st.lists(st.tuples(SHARE, SHARE, st.sampled_from(CELLS)), max_size=3),
    TORN,
    st.sampled_from([(), ("--json",), ("--hop", "0.5", "--objective", "makespan"), ("--memory", "2")]),
)
DRAW_PROFILES = st.tuples(
    st.lists(st.tuples(SHARE, st.one_of(st.sampled_from(NUMBERS), st.sampled_from(SPEAKABLE))), max_size=3),
    TORN,
    st.sampled_from([(), ("--solver", "heuristic"), ("--replicate",), ("--objective", "latency"), ("--devices", "2")]),
)
