"""Operators nobody described are probed: run whole, run split, compare, and keep the rules that hold.

Inputs are small random tensors in which every distinct extent of the real ones has a distinct small stand-in, so that a
rule found here names the same dims there. A rule is kept if it holds for two such sizes and two seeds, uneven pieces
included, forward and backward. Operators that answer differently when called twice are random and not probed. What was
found is kept on disk, one file per signature, under ``$SHARDWRIGHT_CACHE`` or the user's cache folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.caches import cache_folder, keep, read_cached, replace_damaged
from shardwright.errors import DescriptionError
from shardwright.files import parse_json
from shardwright.graph import Op, Ref, Tensor, Value
from shardwright.operators.checking import check, execute, one_thread
from shardwright.operators.rules import LoopRule, Need, OpRules, Placement
from shardwright.records import read_record, shown

STAND_INS = ((6, 10, 4, 12, 9, 5, 8, 7, 11), (8, 6, 9, 4, 10, 7, 5, 12, 11))
"""Small extents for the distinct large ones, in order of appearance; two choices."""
MOST_RULES = 96
"""Candidates tried per operator; beyond it the remaining ones are left out."""
MOST_ELEMENTS = 1 << 18
"""Inputs that cannot be shrunk are probed at their real size up to this many elements."""
VERSION = 3
KIND = "probed"


def probe(op: Op, tensors: Mapping[str, Tensor]) -> OpRules:
    """The rules that hold for an operator when it is run; none, with a reason, where it cannot be."""
    key = _key(op, tensors)
    if (kept := _believed(key, op, tensors)) is not None:
        return kept
    with one_thread():
        rules = _probe(op, tensors)
    _store(key, op.target, rules)
    return rules


def known() -> list[tuple[str, OpRules]]:
    """Every operator that was probed on this machine, with its rules, one entry per signature."""
    folder = cache_folder(KIND)
    names = sorted(file.stem for file in folder.glob("*.json")) if folder is not None else []
    return [entry for name in names if (entry := _load(name)) is not None]


@dataclass(frozen=True)
class _Trial:
    """One small call of the operator."""

    op: Op
    tensors: dict[str, Tensor]
    inputs: tuple[torch.Tensor, ...]


def _probe(op: Op, tensors: Mapping[str, Tensor]) -> OpRules:
    if not op.inputs:
        return _none(f"{op.target} has no tensor inputs, and nothing says what its sizes are")
    trials = [t for n, sizes in enumerate(STAND_INS) if (t := _trial(op, tensors, sizes, seed=n)) is not None]
    if not trials and sum(tensors[name].elements for name in op.inputs) <= MOST_ELEMENTS:
        trials = [t for n in range(2) if (t := _trial(op, tensors, None, seed=n)) is not None]
    if not trials:
        return _none(f"{op.target} could not be run on small random inputs")
    if any(not _repeats(t) for t in trials):
        return _none(f"{op.target} answers differently when it is called twice")
    loops: list[LoopRule] = []
    taken: set[Any] = set()
    for rule in itertools.islice(_candidates(op, tensors), MOST_RULES):
        key = (rule.outputs, tuple(type(n) for n in rule.outputs))
        if key in taken or not _holds(rule, trials):
            continue
        taken.add(key)
        loops.append(rule)
    return OpRules(tuple(loops), "probed", "other", reason="" if loops else f"no split of {op.target} reproduced it")


def _none(reason: str) -> OpRules:
    return OpRules((), "replicated", "other", reason=reason)


def _repeats(trial: _Trial) -> bool:
    first, second = (execute(trial.op, trial.inputs) for _ in range(2))
    return all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(first, second, strict=True)
        if isinstance(a, torch.Tensor) and not a.is_complex()
    )


def _holds(rule: LoopRule, trials: Sequence[_Trial]) -> bool:
    tried = 0
    for trial in trials:
        small = _at_size(rule, trial)
        if small is None:
            return False
        rules = OpRules((small,), "probed", "other")
        for pieces in (2, 3):
            if not small.allows(pieces):
                continue
            tried += 1
            try:
                if check(trial.op, trial.tensors, trial.inputs, [(small.name, pieces)], rules) is not None:
                    return False
            except Exception:  # an unknown operator may fail in any way: then the rule does not hold
                return False
    return tried > 0


def _at_size(rule: LoopRule, trial: _Trial) -> LoopRule | None:
    """The same rule for the trial's extents, which must agree between all dims that are cut."""
    shapes = [trial.tensors[name].shape for name in trial.op.inputs]
    shapes += [trial.tensors[n].shape if n is not None else () for n in trial.op.outputs]
    cut = {
        shape[p.dim]
        for shape, p in zip(shapes, (*rule.inputs, *rule.outputs), strict=True)
        if isinstance(p, Shard) and p.dim < len(shape)
    }
    return LoopRule(rule.name, cut.pop(), rule.inputs, rule.outputs) if len(cut) == 1 else None


def _candidates(op: Op, tensors: Mapping[str, Tensor]) -> Iterator[LoopRule]:
    """Cut one extent wherever it occurs: the most inputs first; results are cut along it, or unreduced sums."""
    inputs = [tensors[name].shape for name in op.inputs]
    outputs = [tensors[n] if n is not None else None for n in op.outputs]
    extents = dict.fromkeys(e for shape in (*inputs, *(o.shape for o in outputs if o)) for e in shape if e > 1)
    number = 0
    for extent in extents:
        choices: list[list[Need]] = []
        for shape in inputs:
            dims: list[Need] = [Shard(d) for d, e in enumerate(shape) if e == extent]
            choices.append([*dims, Replicate()])
        results: list[list[Placement]] = []
        for out in outputs:
            if out is None:
                results.append([Replicate()])
                continue
            places: list[Placement] = [Shard(d) for d, e in enumerate(out.shape) if e == extent]
            if out.dtype.startswith(("float", "bfloat")):
                places.append(Partial("sum"))
            results.append([*places, Replicate()])
        for needs in itertools.product(*choices):
            if all(isinstance(n, Replicate) for n in needs):
                continue
            for placements in itertools.product(*results):
                if all(isinstance(p, Replicate) for p in placements):
                    continue
                number += 1
                yield LoopRule(f"p{number}", extent, tuple(needs), tuple(placements))


def _trial(op: Op, tensors: Mapping[str, Tensor], sizes: Sequence[int] | None, seed: int) -> _Trial | None:
    """A small call, or ``None`` where the operator does not accept it or answers with other dims than it should."""
    generator = torch.Generator().manual_seed(seed)
    extents = dict.fromkeys(e for name in op.inputs for e in tensors[name].shape if e > 1)
    extents |= dict.fromkeys(e for n in op.outputs if n is not None for e in tensors[n].shape if e > 1)
    if sizes is not None and len(extents) > len(sizes):
        return None
    small = dict(zip(extents, sizes, strict=False)) if sizes is not None else {e: e for e in extents}
    made: dict[str, Tensor] = {}
    inputs: list[torch.Tensor] = []
    for name in op.inputs:
        t = tensors[name]
        shape = tuple(small.get(e, e) for e in t.shape)
        inputs.append(_random(t.dtype, shape, generator))
        made[name] = Tensor(name, shape, str(inputs[-1].dtype).removeprefix("torch."), t.grad)

    def shrink(value: Value) -> Value:
        if isinstance(value, tuple):
            return tuple(shrink(v) for v in value)
        if isinstance(value, int) and not isinstance(value, bool):
            return small.get(value, value)
        return value

    shrunk = Op(
        op.name, op.target, tuple(shrink(a) for a in op.args), tuple((k, shrink(v)) for k, v in op.kwargs), op.outputs
    )
    try:
        results = execute(shrunk, inputs)
    except Exception:  # an unknown operator may refuse in any way
        return None
    for n, result in zip(op.outputs, results, strict=False):
        if n is None:
            continue
        if not isinstance(result, torch.Tensor) or result.dim() != len(tensors[n].shape):
            return None
        expected = tuple(small.get(e, e) for e in tensors[n].shape)
        if tuple(result.shape) != expected:
            return None
        made[n] = Tensor(n, expected, str(result.dtype).removeprefix("torch."), tensors[n].grad)
    return _Trial(shrunk, made, tuple(inputs))


def _random(dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random content of a small tensor; whole numbers stay small enough to be indices."""
    if dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.startswith("complex"):
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    if dtype.startswith(("float", "bfloat")):
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 4, shape, generator=generator).to(getattr(torch, dtype))


def _key(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """Signature of the operator: its schema, PyTorch's version, and every argument with tensors as shapes."""
    from shardwright._torch_compat import schema

    def shape(value: Any) -> Any:
        if isinstance(value, Ref):
            t = tensors[value.name]
            return ["tensor", list(t.shape), t.dtype, t.grad]
        if isinstance(value, tuple):
            return [shape(v) for v in value]
        return repr(value)

    outputs = [None if n is None else [list(tensors[n].shape), tensors[n].dtype] for n in op.outputs]
    parts = [VERSION, torch.__version__, str(schema(op.target)), shape(op.args), [[k, shape(v)] for k, v in op.kwargs]]
    return hashlib.sha256(json.dumps([*parts, outputs]).encode()).hexdigest()[:24]


def _text(placement: Any) -> str:
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return "P" if isinstance(placement, Partial) else "R"


def _placement(text: str) -> Any:
    if text in ("P", "R"):
        return Partial("sum") if text == "P" else Replicate()
    if len(text) == 2 and text[0] == "S" and text[1] in "0123456789":
        return Shard(int(text[1]))
    raise ValueError(f"{shown(text)} is no placement")


@dataclass(frozen=True)
class _Record:
    """A probed operator as it is kept: every loop with its extent, what it needs and what it gives."""

    target: str
    origin: str
    reason: str
    loops: tuple[tuple[str, int, tuple[str, ...], tuple[str, ...]], ...]


def _store(key: str, target: str, rules: OpRules) -> None:
    loops = [[r.name, r.extent, [_text(n) for n in r.inputs], [_text(p) for p in r.outputs]] for r in rules.loops]
    record = {"target": target, "origin": rules.origin, "reason": rules.reason, "loops": loops}
    keep(KIND, f"{key}.json", json.dumps(record))


def _load(key: str) -> tuple[str, OpRules] | None:
    """A kept operator and its rules; a damaged file is named and taken away."""
    name = f"{key}.json"
    content = read_cached(KIND, name)
    if content is None:
        return None
    try:
        data = parse_json(content.decode("utf-8", "replace"), name, DescriptionError)
        record = read_record(_Record, data, where=name, error=DescriptionError)
        loops = tuple(
            LoopRule(loop, extent, tuple(map(_placement, needs)), tuple(map(_placement, results)))
            for loop, extent, needs, results in record.loops
        )
    except (DescriptionError, ValueError) as error:
        replace_damaged(KIND, name, getattr(error, "message", str(error)))
        return None
    return record.target, OpRules(loops, record.origin, "other", reason=record.reason)


def _believed(key: str, op: Op, tensors: Mapping[str, Tensor]) -> OpRules | None:
    """What is kept about this operator, if it fits it and still holds.

    PyTorch's own operators change with its version, which is part of the key. Anybody else's may have been edited since,
    under the same name: their rules are run once more.
    """
    found = _load(key)
    if found is None:
        return None
    target, rules = found
    ranks = [len(tensors[name].shape) for name in op.inputs], [len(tensors[n].shape) if n else 0 for n in op.outputs]
    fits = all(
        len(places) == len(dims)
        and all(not isinstance(p, Shard) or p.dim < d for p, d in zip(places, dims, strict=True))
        for loop in rules.loops
        for places, dims in zip((loop.inputs, loop.outputs), ranks, strict=True)
    )
    if target != op.target or not fits or rules.origin not in ("probed", "replicated"):
        replace_damaged(KIND, f"{key}.json", f"it is not about {op.target}")
        return None
    if not op.target.startswith(("aten.", "prims.")) and rules.loops:
        with one_thread():
            trials = [
                t for n, sizes in enumerate(STAND_INS[:1]) if (t := _trial(op, tensors, sizes, seed=n)) is not None
            ]
            if not trials or not all(_holds(loop, trials) for loop in rules.loops):
                return None
    return rules
