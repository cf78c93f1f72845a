"""Questions about a whole job, asked of ``shardwright plan``: a row for every size, cluster or batch, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.cli._show import bytes_text, console, mesh_text, print_json, seconds_text, table
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.planner.sizing import Row


@dataclass(frozen=True)
class Answer:
    """What was asked, a row for everything that was planned, the best one and a sentence about it."""

    question: str
    rows: Sequence[Row]
    best: Row | None
    sentence: str
    prices: Sequence[float | None]


def check_one_question(devices: bool, max_batch: bool, clusters: bool, others: bool) -> None:
    """Refuse two questions at once, and a question beside a picture or a curve of one plan."""
    asked = [
        name for name, here in (("--devices", devices), ("--max-batch", max_batch), ("two --cluster", clusters)) if here
    ]
    if len(asked) > 1:
        raise ShardwrightError(f"{' and '.join(asked)} are two questions.", "Ask one at a time.")
    if asked and others:
        raise ShardwrightError(
            f"{asked[0]} compares plans; --frontier and --html are about one.", "Save that with -o and look at it then."
        )


def worth(graph: Any, cluster: Any, devices: str, options: Any, say: Callable[[str], None]) -> Answer:
    """How many devices are worth it."""
    from shardwright.planner.sizing import HALF, by_devices, sizes_between, worth_it

    rows = by_devices(graph, cluster, sizes_between(devices), options, say)
    best = worth_it(rows)
    said = "Nothing fits."
    if best is not None:
        said = f"Up to {best.devices} devices are worth it: each does at least {HALF:.0%} of what one does at best."
    return Answer("How many devices are worth it", rows, best, said, [None] * len(rows))


def largest(
    capture_at: Callable[[int], Any], cluster: Any, options: Any, start: int, say: Callable[[str], None]
) -> Answer:
    """The largest batch that fits."""
    from shardwright.planner.sizing import by_batch

    rows = by_batch(capture_at, cluster, options, start=start, progress=say)
    best = max((row for row in rows if row.plan is not None), key=lambda row: row.batch, default=None)
    above = min((row.batch for row in rows if row.plan is None), default=None)
    said = "Not even the smallest fits." if best is None else f"A batch of {best.batch} fits"
    if best is not None:
        said += "; larger ones were not tried." if above is None else f", one of {above} does not."
    return Answer("The largest batch that fits", rows, best, said, [None] * len(rows))


def cheapest(
    graph: Any, clusters: Sequence[Any], options: Any, prices: Sequence[str], say: Callable[[str], None]
) -> Answer:
    """Which cluster is cheaper per token: by the prices of devices, or by their seconds."""
    from shardwright.planner.sizing import by_cluster, like_with_like

    paid = prices_of(prices, len(clusters))
    rows = by_cluster(graph, clusters, options, say)
    costs = {i: (paid[i] or 1.0) * r.device_seconds_per_token for i, r in enumerate(rows) if r.plan is not None}
    best = rows[min(costs, key=lambda i: costs[i])] if costs else None
    unit = "by these prices" if prices else "in device-seconds (say --price for money)"
    said = "Nothing fits." if best is None else f"{best.cluster} is cheapest per token {unit}."
    if like_with_like(clusters) != tuple(clusters):
        said += " What the host takes is left out of all of them: it was not measured beside every device."
    return Answer("Which cluster is cheaper per token", rows, best, said, paid)


def prices_of(texts: Sequence[str], clusters: int) -> list[float | None]:
    """What a device costs an hour, one for all clusters or one for each; nothing where nobody says."""
    if not texts:
        return [None] * clusters
    try:
        prices: list[float | None] = [float(text) for text in texts]
    except ValueError:
        prices = []
    if len(prices) not in (1, clusters) or any(not 0 < (price or 0) < float("inf") for price in prices):
        raise ShardwrightError(
            f"{' '.join(texts)} is no price of a device and hour for each of {clusters} clusters.",
            "Give --price once, or once for every --cluster, in their order.",
        )
    return prices * clusters if len(prices) == 1 else prices


def show_answer(answer: Answer, as_json: bool) -> None:
    """The rows as a table with the answer under it, or both as JSON."""
    rows, paid = answer.rows, answer.prices
    if as_json:
        entries = [_entry(row, price) for row, price in zip(rows, paid, strict=True)]
        best = None if answer.best is None else _entry(answer.best, None)
        print_json({"question": answer.question, "answer": answer.sentence, "best": best, "rows": entries})
        return
    first = next((row for row in rows if row.plan is not None), None)
    money = any(price is not None for price in paid)
    unit = "price of 10⁶ tokens" if money else "device-s per 10⁶ tokens"
    lines = []
    for row, price in zip(rows, paid, strict=True):
        if row.plan is None or first is None:
            lines.append([row.cluster, str(row.batch), "–", "–", "–", "–", "–", f"no: {row.refusal}"])
            continue
        each = 1e6 * row.device_seconds_per_token
        share = first.device_seconds_per_token / row.device_seconds_per_token
        lines.append(
            [
                row.cluster,
                str(row.batch),
                seconds_text(row.seconds),
                f"{row.tokens / row.seconds:,.0f}",
                f"{100 * share:.0f} %",
                f"{each * price / 3600:.4g}" if price is not None else f"{each:.4g}",
                bytes_text(row.plan.prediction.memory_bytes),
                mesh_text(row.plan.stages[0].strategy.axes),
            ]
        )
    table(
        answer.question,
        ["cluster", "batch", "step", "tokens/s", "per device", unit, "memory", "mesh"],
        lines,
        caption=f"Simulated steps; memory is a device's. {answer.sentence}",
        spare=("mesh", "per device"),
    )
    console.print("per device: tokens a second and device against the first row.")


def _entry(row: Row, price: float | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "cluster": row.cluster,
        "devices": row.devices,
        "batch": row.batch,
        "tokens": row.tokens,
        "refusal": row.refusal or None,
    }
    if row.plan is not None:
        entry |= {
            "used_devices": row.used,
            "mesh": row.plan.stages[0].strategy.axes,
            "prediction": vars(row.plan.prediction),
            "step_bound": row.plan.proof.step_bound,
            "tokens_per_second": row.tokens / row.seconds,
            "device_seconds_per_token": row.device_seconds_per_token,
        }
        if price is not None:
            entry["price_per_million_tokens"] = 1e6 * row.device_seconds_per_token * price / 3600
    return entry
