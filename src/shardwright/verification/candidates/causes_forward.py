"""Mistakes that show before any gradient: weights at the start, dropout, partial sums, shards, rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from shardwright.verification.candidates.case import Case, Finding, Hypothesis, divides, listed, multiple
from shardwright.verification.candidates.evidence import EXACT, Evidence
from shardwright.verification.candidates.recognising import NOBODY, Numbers, Places
from shardwright.verification.compare import Comparison

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def at_the_start(evidence: Evidence, wrong: Sequence[Comparison]) -> Finding | None:
    """Weights that are not the model's, that nobody holds, or whose shards are in another order than is said."""
    for item in wrong:
        if item.what != "parameter":
            continue
        if item.name.endswith("in its order"):
            name = item.name.removesuffix(" in its order")
            sentence = (
                f"{name} holds the model's numbers in another order than its DTensor says: its shards are exchanged."
            )
            return Finding("shards in another order", f"{sentence} Look at how it was sharded or loaded.")
        if item.name.endswith("the model does not have"):
            share = f"{item.difference:.0f} of {item.size:.0f}"
            sentence = f"{item.name.partition(':')[0]} begins with {share} numbers that the model does not have."
            return Finding(
                "other weights", f"{sentence} Build from the given model's weights, without initialising again."
            )
        if item.name.endswith("no rank holds"):
            share = f"{item.difference:.0f} of {item.size:.0f}"
            sentence = f"{share} numbers of {item.name.partition(':')[0]} are held by no rank."
            return Finding("weights missing", f"{sentence} Look for a shard or a layer that was left out.")
    return None


def of_dropout(dropped: Sequence[tuple[Comparison, tuple[int, int], bool]]) -> Finding:
    """Which ranks share a seed that they must not share, or should share one."""
    item, (one, other), replicas = next(found for found in dropped if not found[0].agrees)
    where = item.name.partition(":")[0]
    if replicas:
        return Finding(
            "dropout differs where replicated",
            f"Ranks {one} and {other} hold the same activations at {where} and drop different ones of them: "
            "seed dropout alike on the ranks of one tensor-parallel group.",
        )
    return Finding(
        "dropout alike on different parts",
        f"Ranks {one} and {other} hold different activations at {where} and drop the very same places: "
        "seed every rank that holds other rows or another shard by its own number.",
    )


def order_of_shards(case: Case) -> Finding | None:
    """The ranks hold a weight's shards in one order, and those of all other weights in another."""
    if not case.loss or case.step:
        return None
    orders: dict[str, tuple[int, ...]] = {}
    for name in case.evidence.known.spans:
        holders = case.evidence.held_by(name)
        if len(holders) > 1 and len({int(holder.places.min()) for holder in holders}) > 1:
            # Of one cut per rank; fused weights and hybrid shards repeat ranks, and their order is looked at likewise.
            firsts = {holder.rank: int(holder.places[(_in(case, name, holder.places))].min()) for holder in holders}
            orders[name] = tuple(np.argsort(np.argsort(list(firsts.values()), kind="stable"), kind="stable"))
    usual = max(set(orders.values()), key=list(orders.values()).count, default=())
    odd = [name for name, order in orders.items() if len(order) == len(usual) and order != usual]
    if not odd or len(set(orders.values())) < 2:
        return None
    ranks = ", ".join(map(str, np.argsort(orders[odd[0]])))
    return Finding(
        "shards in another order",
        f"{listed(odd)}: the shards lie on ranks {ranks} in turn, those of the other weights do not: "
        "look at how shards were cut or loaded, by rank within the tensor-parallel group.",
    )


def _in(case: Case, name: str, places: Places) -> NDArray[np.bool_]:
    span = case.evidence.known.spans[name]
    return (places >= span.start) & (places < span.stop) & (places != NOBODY)


def bias_on_every_rank(case: Case) -> Finding | None:
    """A row-parallel layer adds its bias before the sum over ranks: it counts as often as there are ranks."""
    wrong = next((output for output in case.outputs if not output.held), None)
    if not case.loss or case.step or wrong is None:
        return None
    before = case.outputs[: case.outputs.index(wrong)]
    for output in (wrong, *reversed(before)):
        bias = f"{output.path}.bias"
        if bias not in case.evidence.parameters:
            continue
        value = case.evidence.parameters[bias].detach().double().numpy()
        if len(output.true) % len(value):
            continue
        for theirs, summed in _whole_and_summed(case, output.path, output.true, output.theirs):
            more = (theirs - output.true).reshape(-1, len(value))
            for times in range(1, case.evidence.ranks):
                if np.abs(more - times * value).max() <= EXACT * (np.abs(value).max() + 1e-300):
                    following = case.outputs[case.outputs.index(output) + 1 :]
                    if summed and any(_apart(case, after.path) for after in following[:1]):
                        return _not_reduced(output.path, following[0].path)
                    return Finding(
                        "bias added on every rank",
                        f"The output of {output.path} has its bias {times + 1} times: "
                        "add it once, after the sum over the tensor-parallel ranks (or on one of them).",
                    )
    return None


def _apart(case: Case, path: str) -> bool:
    """Whether ranks with the same rows hold different wholes of an output."""
    groups: dict[int, list[Numbers]] = {}
    for rank in case.evidence.seen:
        if path in rank.outputs:
            groups.setdefault(rank.rows[0], []).append(rank.outputs[path])
    return any(
        one.shape == group[0].shape and np.abs(one - group[0]).max(initial=0.0) > EXACT * np.abs(one).max(initial=0.0)
        for group in groups.values()
        for one in group
    )


def _whole_and_summed(case: Case, path: str, true: Numbers, theirs: Sequence[Numbers]) -> list[tuple[Numbers, bool]]:
    """An output as each rank holds it, and (true) added up over the ranks of the same rows."""
    whole = [(output, False) for output in theirs if output.shape == true.shape]
    groups: dict[int, list[Numbers]] = {}
    for rank in case.evidence.seen:
        if path in rank.outputs and rank.outputs[path].shape == true.shape:
            groups.setdefault(rank.rows[0], []).append(rank.outputs[path])
    return whole + [(np.sum(group, axis=0), True) for group in groups.values()]


def partial_sums_kept(case: Case) -> Finding | None:
    """What a row-parallel layer returns goes on unreduced."""
    if not case.loss or case.step:
        return None
    for output, following in zip(case.outputs, case.outputs[1:], strict=False):
        if not following.held and output.held == "partial sum":
            return _not_reduced(output.path, following.path)
        if not following.held:
            return None
    return None


def _not_reduced(path: str, following: str) -> Finding:
    return Finding(
        "partial sums not reduced",
        f"The ranks' outputs of {path} are partial sums, and {following or 'the model'} after it is wrong: add them up "
        "(all-reduce or reduce-scatter over the tensor-parallel ranks) before they are used.",
    )


def positions_repeated(case: Case) -> Finding | None:
    """Every rank holds a part of an output, all hold the same one, and nobody holds the others."""
    if not case.loss or case.step:
        return None
    for output in case.outputs:
        if output.held == "part" and output.covered < 0.9 and case.evidence.parts == 1:
            return Finding(
                "the same part on every rank",
                f"All ranks hold the same {output.covered:.0%} of the output of {output.path or 'the model'}: "
                "let each begin where its part of the sequence (positions, tokens, rows) begins.",
            )
        if not output.held:
            return None
    return None


def rows_by_themselves(case: Case) -> Finding | None:
    """Every rank treats its rows as a whole batch: means over unequal numbers, statistics of its own."""
    evidence, parts = case.evidence, case.evidence.parts
    for count in dict.fromkeys((parts, parts * evidence.calls, evidence.calls)):
        if count < 2 or not divides(case, count):
            continue
        runs = [evidence.on_rows(case.step, which, count) for which in range(count)]
        mean = np.mean([evidence.gradient(run) for run in runs], axis=0)
        theirs = np.nan_to_num(evidence.row("gradients", case.step))
        right = evidence.gradient(evidence.one_process(case.step))
        size = float(np.abs(right).max(initial=0.0))
        if np.abs(mean - right).max(initial=0.0) <= EXACT * size:
            continue
        factor = multiple(theirs, mean)
        if factor is None:
            continue
        who = f"{count} data-parallel ranks" if count == parts else f"{count} micro-batches"
        times = "" if abs(factor - 1) < EXACT else f", times {factor:.4g}"
        norm = next((n for n, m in evidence.model.named_modules() if isinstance(m, BATCH_NORMS)), "")
        if norm:
            return Finding(
                "batch-norm statistics local",
                f"Gradients are those of {who} that each normalise by statistics of their own rows{times} "
                f"(first at {norm}): use SyncBatchNorm, or accept another model than on one process.",
            )
        return Finding(
            "labels averaged per part",
            f"Gradients are the plain mean over {who} of losses that are means over unequal numbers of labels{times}: "
            "add up the losses and divide by the number of labels of the whole batch.",
        )
    return None


FORWARD: tuple[Hypothesis, ...] = (
    order_of_shards,
    bias_on_every_rank,
    partial_sums_kept,
    positions_repeated,
    rows_by_themselves,
)
