"""Configurations drawn at random, settled on their devices."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from shardwright.exchange import Configuration
from shardwright.schedules import RECIPES


@st.composite
def configurations(draw: Any) -> Configuration:
    """A configuration that means something: every degree said, rows that make whole micro-batches."""
    sizes = {name: draw(st.sampled_from([1, 1, 2, 4])) for name in ("replicate", "shard", "context", "tensor")}
    pipeline, schedule = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from(sorted(RECIPES)))
    each = RECIPES[schedule].stages_per_device or 2
    devices = pipeline
    for size in sizes.values():
        devices *= size
    rows, passes = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4, 8]))
    cut = tuple(f"layers.{number}" for number in range(1, pipeline * each))
    return Configuration(
        "plan",
        devices=devices,
        **sizes,
        sequence=draw(st.booleans()),
        pipeline=pipeline,
        expert=draw(st.sampled_from([1, 1, 2])),
        sharding=draw(st.sampled_from(["optimizer", "gradients", "parameters"])),
        reshard=draw(st.booleans()),
        schedule=schedule,
        stages_per_device=each,
        cuts=draw(st.sampled_from([(), cut])),
        microbatch=rows,
        microbatches=passes,
        batch=rows * passes * sizes["replicate"] * sizes["shard"],
        length=128,
        recompute=draw(st.sampled_from(["none", "light", "blocks"])),
        recomputed_share=draw(st.sampled_from([1.0, 0.5, 0.7])),
        precision=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        optimizer=draw(st.sampled_from(["adamw", "sgd"])),
        modules=(("layers.*.up", "columns"), ("layers.*.down", "rows")),
    )
