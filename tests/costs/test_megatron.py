"""The public Megatron measurements: fitted on a tenth of the rows, the rest is predicted within the published error."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy_megatron", ROOT / "bench" / "accuracy_megatron.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy_megatron"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_within_the_published_simulators_error(megatron: ModuleType, published: Path) -> None:
    result = megatron.evaluate(megatron.read(published / "measured"), seed=7)
    assert result["mape"] <= megatron.PUBLISHED
    assert result["spearman worst"] >= 0.95 and result["regret mean"] <= 0.03
    assert len(result["constants"]) <= 6


def test_least_squares_finds_the_constants_it_should(megatron: ModuleType) -> None:
    x = np.linspace(0.1, 3, 40)
    target = 2.5 * np.exp(-0.7 * x)
    found = megatron.least_squares(lambda c: np.exp(c[0]) * np.exp(-np.exp(c[1]) * x) - target, np.array([0.0, 0.0]))
    assert np.exp(found) == pytest.approx([2.5, 0.7], rel=1e-3)
