"""The list behind ``shardwright ops``: every operator with a rule, and the loops of a sample call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Shard

from shardwright.operators.deriving import derived
from shardwright.operators.probing import known
from shardwright.operators.record import records
from shardwright.operators.rules import LoopRule, Window
from shardwright.verification.auditing import targets_with_samples
from shardwright.verification.samples import EVEN, calls


@dataclass(frozen=True)
class Listed:
    """One operator: what kind it is, where its rule comes from, its loops in words."""

    target: str
    kind: str
    origin: str
    loops: tuple[str, ...]


def listing(names: Sequence[str] = ()) -> list[Listed]:
    """Every operator with a rule: described, element-wise, and those that were probed on this machine.

    >>> listing(["aten.bmm"])[0].loops
    ('n: shard', 'i: shard', 'j: shard', 'k: sum')
    """
    found = [_of_sample(target) for target in targets_with_samples(names)]
    rest = {t: r for t, r in records().items() if r.function is not None and r.samples is None}
    found += [Listed(t, r.kind, "described", ()) for t, r in rest.items() if not names or any(n in t for n in names)]
    probed = {t: rules for t, rules in known() if rules.loops and (not names or any(n in t for n in names))}
    found += [Listed(t, rules.kind, "probed", tuple(map(in_words, rules.loops))) for t, rules in probed.items()]
    return sorted(found, key=lambda entry: entry.target)


def _of_sample(target: str) -> Listed:
    sample = next(calls(target, EVEN))
    rules = derived(sample.op, sample.tensors)
    return Listed(target, rules.kind, rules.origin, tuple(in_words(loop) for loop in rules.loops))


def in_words(loop: LoopRule) -> str:
    """``"k: sum"``, ``"y0: shard with halo"``, ``"i2: shard, exchanging max and sum"``."""
    if not loop.divides:
        return f"{loop.name}: passes sums"
    if any(isinstance(need, Window) for need in loop.inputs):
        text = "shard with halo"
    elif any(isinstance(p, Shard) for p in loop.outputs):
        text = "shard"
    else:
        text = next((str(p.reduce_op) for p in loop.outputs if isinstance(p, Partial)), "reduced inside")
    if loop.even:
        text += " (equal pieces)"
    if loop.exchanges:
        text += ", exchanging " + " and ".join(dict.fromkeys(e.reduce for e in loop.exchanges))
    return f"{loop.name}: {text}"
