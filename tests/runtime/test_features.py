"""What one mesh can do, every plan can: a table of features by kinds of plan, every cell run against one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from runtime import features
from runtime.features import KINDS
from runtime.pool import PAIR, POOL


class Feature(NamedTuple):
    run: Callable[[int, str, str], Any]
    refused: Mapping[str, str] = MappingProxyType({})
    """By the kind of plan, the sentence that refuses it."""
    processes: int = 2
    needs: str = "torch"
    """A library."""


PARTS = "what a rank has of it is no one region, or none"
FEATURES = {
    "other shapes and lengths": Feature(features.other_shapes),
    "evaluation and no_grad": Feature(features.evaluation),
    "gradients of inputs": Feature(features.input_gradients),
    "rows per rank": Feature(features.rows_per_rank),
    "local inputs": Feature(features.local_inputs, dict.fromkeys(KINDS[1:], PARTS)),
    "Trainer": Feature(features.trainer, needs="accelerate"),
    "Accelerate": Feature(features.accelerate, needs="accelerate"),
    "Lightning": Feature(features.lightning, needs="pytorch_lightning"),
    "generate": Feature(features.generate, needs="transformers"),
    "save_pretrained": Feature(features.save_pretrained, needs="transformers"),
    "checkpoints under every other plan": Feature(features.checkpoints, processes=4),
    "moves to every other plan": Feature(features.moves),
    "compile()": Feature(features.compiled),
    "dropout": Feature(features.dropout),
    "averages and copies": Feature(features.averages_and_copies, processes=4),
    "whole state_dicts": Feature(features.whole_states),
    "norms and clipping": Feature(features.clipping),
    "the assistant's moves": Feature(features.moved_work),
    "inference": Feature(features.inference),
    "other ranks after a restart": Feature(features.other_ranks, processes=4),
}
CELLS = [(name, kind) for name in FEATURES for kind in KINDS]
SHORT = {(name, KINDS[number % len(KINDS)]) for number, name in enumerate(FEATURES)}
"""A diagonal; all others are in the long suite."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*cell, marks=() if cell in SHORT else pytest.mark.long, id=", ".join(cell)) for cell in CELLS],
)
def test_feature(name: str, kind: str, tmp_path: Path) -> None:
    feature = FEATURES[name]
    pytest.importorskip(feature.needs)
    pool = PAIR if feature.processes == 2 else POOL
    if kind not in feature.refused:
        pool.run(feature.run, kind, str(tmp_path), seconds=280)
        return
    with pytest.raises(AssertionError) as caught:
        pool.run(feature.run, kind, str(tmp_path), seconds=120)
    assert str(caught.value).count("Error: ") and feature.refused[kind] in str(caught.value)
