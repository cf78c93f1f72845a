"""Plans and checkpoints that somebody has changed, run to the end: the right numbers, or a refusal, and nothing else.

A case is made of a number alone. Plans run on two processes, two steps of training and a call in evaluation mode beside the
same model on one; checkpoints are resumed, and all tensors compared. Besides damage of all kinds there are changes by
somebody who knows the format: names of operators and arguments, structures of calls, layouts and routes that are words of
the format and not those of this plan, instructions in a checkpoint's pickle. Who also mends the checksums of a checkpoint
can write any weights into it: that is not asked here.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.mutations import NUMBERS, WAYS, WORDS, changed, deepened, torn
from shardwright.errors import ShardwrightError
from shardwright.graph import fingerprint, from_json
from shardwright.plans import from_json as plan_from

RIGHT, REFUSED = "right", "refused"


class Model(nn.Module):
    """Training gives a loss, evaluation takes a branch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 12)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        logits = self.head(x)
        if not self.training:
            return torch.softmax(2.0 * logits, -1)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 12, (8, 4), generator=generator), torch.randint(0, 12, (8, 4), generator=generator)


@functools.cache
def plans() -> tuple[str, ...]:
    """Plans for two processes: rows cut, parameters cut, operators cut, and two stages."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, Pipelining, plan, plan_pipeline
    from shardwright.plans import to_json

    model, args = Model().double(), batch(0)
    found = [
        plan(model, args, cluster="local:2", search=search, baselines=(), fewer_devices=False, also=[(args, {}, False)])
        for search in ("data-parallel", "fsdp", "auto")
    ]
    options = Options(search="data-parallel", baselines=())
    found.append(plan_pipeline(capture(model, args), parse_cluster("local:2"), Pipelining(2, 2, "1f1b"), options))
    return tuple(to_json(one) for one in found)


@functools.cache
def expected() -> list[Tensor]:
    torch.manual_seed(0)
    return trained(Model().double())


def trained(model: nn.Module) -> list[Tensor]:
    """Two losses, what evaluation gives, all parameters of this rank."""
    from shardwright.runtime.shards import whole

    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(2):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    with torch.no_grad():
        found.append(model.eval()(*batch(3)))
    named = dict(model.named_parameters())
    return [whole(x).detach() for x in (*found, *(named[name] for name in sorted(named)))]


def run_plan(text: bytes) -> str:
    """What became of a plan on this rank of two."""
    from shardwright.runtime import parallelize

    torch.manual_seed(0)
    try:
        plan = plan_from(text.decode())
        found = trained(parallelize(Model().double(), plan))
    except (ShardwrightError, UnicodeDecodeError):  # a file that is no text is refused where it is read
        return REFUSED
    theirs = expected()
    if len(found) != len(theirs):  # with stages: losses, and the parameters of this rank's
        return RIGHT if all(close(a, b) for a, b in zip(found[:3], theirs, strict=False)) else "wrong losses"
    return RIGHT if all(map(close, found, theirs)) else "wrong numbers"


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def tampered_plan(number: int) -> tuple[str, bytes]:
    """A kind of change, and the file."""
    draw = random.Random(number)
    text = draw.choice(plans())
    kind = draw.choice(list(PLAN_KINDS))
    return kind, PLAN_KINDS[kind](text, draw)


def _bytes(text: str, draw: random.Random) -> bytes:
    return torn(text.encode(), (draw.choice(["cut", "flip", "insert"]), draw.random(), draw.randbytes(4)))


def _changes(draw: random.Random) -> list[Any]:
    values = [*NUMBERS, *WORDS, None, True, [], {}, [1], {"x": 1}]
    return [(draw.choice(WAYS), draw.random(), draw.random(), draw.choice(values)) for _ in range(draw.randint(1, 3))]


def _fields(text: str, draw: random.Random) -> bytes:
    return deepened(json.dumps(changed(json.loads(text), _changes(draw))))


def _words(text: str, draw: random.Random) -> bytes:
    """One word of the strategy in the place of another."""
    document = json.loads(text)
    holder = draw.choice(document["stages"]) if document.get("stages") else document
    table = holder[draw.choice(["splits", "resting"])]
    name, other = draw.choice(list(table)), draw.choice(list(table))
    table[name] = draw.choice(
        [table[other], ["R"], ["S0"], ["S1"], ["P(sum)"], [None], ["i"], ["b"], ["n"], ["j"], ["k"]]
    )
    return json.dumps(document).encode()


def _decisions(text: str, draw: random.Random) -> bytes:
    """Other routes, sums, sizes or orders of passes."""
    document = json.loads(text)
    holder = draw.choice(document["stages"]) if document.get("stages") else document
    keys = [key for key in ("routes", "nests", "sizes", "regathered", "kept", "recomputed") if holder.get(key)]
    if document.get("stages") and draw.random() < 0.5:
        holder, keys = document, [key for key in ("schedule", "microbatches") if key in document]
    key = draw.choice(keys)
    left = changed([holder[key]], _changes(draw)[:1])
    holder[key] = left[0] if left else None
    for route in holder["routes"] if key == "routes" and isinstance(holder[key], list) else ():
        for step in route.get("forward", ()) if isinstance(route, dict) and draw.random() < 0.3 else ():
            if isinstance(step, dict):
                step["kind"] = draw.choice(
                    ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "mask"]
                )
    return deepened(json.dumps(document))


def _graph(change: Callable[[Any, random.Random], Any]) -> Callable[[str, random.Random], bytes]:
    """Deep inside a graph that the plan holds, past the checks of the file around it."""

    def tampered(text: str, draw: random.Random) -> bytes:
        document = json.loads(text)
        others = bool(document.get("also")) and draw.random() < 0.5
        packed = document["also"][0] if others else document["graph"]
        graph = json.loads(zlib.decompress(base64.b64decode(packed)))
        written = deepened(json.dumps(change(graph, draw)))
        packed = base64.b64encode(zlib.compress(written)).decode()
        if others:
            document["also"] = [packed]
            return json.dumps(document).encode()
        document["graph"] = packed
        if draw.random() < 0.7:
            with contextlib.suppress(ShardwrightError, UnicodeDecodeError):
                document["signature"]["fingerprint"] = fingerprint(from_json(written.decode()))
        return json.dumps(document).encode()

    return tampered


CODE = "**({} if open('./ran', 'w') else {}), bias"
EVIL_NODES = (
    ["n", "operator:methodcaller", ["sum"], {}, True],
    ["n", "math:__loader__", [], {}, True],
    ["n", "aten.from_file.default", ["./ran", True, 8], {}, True],
)


def _code(graph: Any, draw: random.Random) -> Any:
    """What would run something, were it believed."""
    op = draw.choice(graph["ops"])
    way = draw.randrange(6)
    if way == 0:
        op["kwargs"] = {CODE: op["args"].pop() if op["args"] else 1}
    elif way == 1:
        op.update(target="shardwright.autograd_function.default", args=["canary:Function", [], "[]"], kwargs={})
    elif way == 2:
        body = json.dumps({"nodes": [draw.choice(EVIL_NODES)], "results": []})
        op.update(target="shardwright.unknown_extents.default", args=[body, []], kwargs={})
    elif way == 3:
        graph["ops"].append(
            {**op, "name": "more", "target": "aten.from_file.default", "args": ["./ran", True, 8], "outputs": [None]}
        )
    elif way == 4:
        context = '[{"__enum__": true, "fqn": "canary:K", "name": "a"}]'
        node = {"type": "builtins.dict", "context": context, "children_spec": []}
        graph[draw.choice(["input_tree", "output_tree"])] = json.dumps([1, node])
    else:
        old, new = draw.choice(graph["inputs"])[0], f"x=open('./ran', 'w'), *{draw.random()}"
        text = json.dumps(graph).replace(json.dumps(old), json.dumps(new))
        return json.loads(text)
    return graph


def _meaning(graph: Any, draw: random.Random) -> Any:
    """Something else is computed, well formed all the same."""
    op = draw.choice(graph["ops"])
    numbers = [place for place, value in enumerate(op["args"]) if type(value) in (int, float)]
    if numbers and draw.random() < 0.7:
        op["args"][draw.choice(numbers)] += 1
    else:
        op["target"] = draw.choice(["aten.neg.default", "aten.relu.default", "aten.exp.default", op["target"]])
        op["grad"] = draw.random() < 0.5
    return graph


PLAN_KINDS: dict[str, Callable[[str, random.Random], bytes]] = {
    "bytes": _bytes,
    "fields": _fields,
    "words of the strategy": _words,
    "decisions": _decisions,
    "fields of a graph": _graph(lambda graph, draw: changed(graph, _changes(draw))),
    "what a graph computes": _graph(_meaning),
    "code in a graph": _graph(_code),
}


def resumed(state: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer as after some steps of a training of their own."""
    torch.manual_seed(state)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch(state)).backward()
    optimizer.step()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    inside = [x for held in optimizer.state_dict()["state"].values() for x in held.values()]
    return [x.clone() for x in (*model.state_dict().values(), *inside)]


class Execute:
    """Pickles as a call."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ./ran",)


BUILD = b"cpathlib\nPurePosixPath\n(N}(\x8c\x06parentcpathlib\nPurePosixPath\n(\x8c\x05elsewtRutb0"


def tamper_checkpoint(folder: Path, number: int) -> str:
    """Change something in a checkpoint directory; what kind of change it was."""
    draw = random.Random(number)
    files = sorted(folder.iterdir())
    path, kind = draw.choice(files), draw.choice(["flip", "cut", "insert", "block", "delete", "swap", "pickle", "code"])
    data = path.read_bytes()
    if kind == "flip":
        bad, at = bytearray(data), draw.randrange(8 * len(data))
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
    elif kind in ("cut", "insert"):
        path.write_bytes(torn(data, (kind, draw.random(), draw.randbytes(8) or b"x")))
    elif kind == "block":
        at = draw.randrange(len(data))
        path.write_bytes(data[:at] + bytes(512) + data[at + 512 :])
    elif kind == "delete":
        path.unlink()
    elif kind == "swap":
        other = draw.choice(files)
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        metadata = folder / ".metadata"
        raw = metadata.read_bytes()
        if kind == "code":
            new = draw.choice([pickle.dumps(Execute()), raw[:2] + BUILD + raw[2:], raw[:-1] + b"0cos\nsystem\n."])
        else:  # other instructions, by chance
            bad = bytearray(raw)
            for _ in range(draw.randint(1, 3)):
                bad[draw.randrange(2, len(bad))] = draw.randrange(256)
            new = bytes(bad)
        metadata.write_bytes(new)
        if kind == "code":  # by somebody who knows of checksums
            sums = json.loads((folder / "checksums.json").read_text())
            (folder / "checksums.json").write_text(json.dumps({**sums, "metadata": zlib.crc32(new)}))
    return kind


def run_checkpoint(good: Path, number: int, scratch: Path) -> tuple[str, str]:
    """A kind of change, and what became of resuming from it."""
    from shardwright.runtime.checkpoint import load_checkpoint

    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(good, scratch)
    saved, other = resumed(1), resumed(2)
    kind = tamper_checkpoint(scratch / "step-1", number)
    try:
        extra = load_checkpoint(scratch, *other)
    except ShardwrightError:
        return kind, REFUSED
    same = extra == {"step": 1} and all(map(torch.equal, tensors(*saved), tensors(*other)))
    return kind, RIGHT if same else "wrong values"


def save_for(folder: Path) -> None:
    """What :func:`run_checkpoint` damages."""
    from shardwright.runtime.checkpoint import save_checkpoint

    save_checkpoint(folder, 1, *resumed(1))


def case(rank: int, number: int, plan: bytes, folder: str) -> str:
    """One plan on one rank, in a folder of its own: nothing may be written there."""
    os.chdir(folder)
    outcome = run_plan(plan)
    return outcome if not os.listdir(folder) else f"wrote {os.listdir(folder)}"
