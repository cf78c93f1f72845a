"""Fifty-one models that are not Hugging Face's: every one is captured with the eager model's numbers."""

from __future__ import annotations

import pytest
from tests.frontend.faithful import faithful
from tests.frontend.various import MODELS, build

DECIDES_ON_DATA = ("guarded",)


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_computes_what_the_model_computes(name: str) -> None:
    model, args, kwargs = build(name)
    faithful(model, args, kwargs, meta=name not in DECIDES_ON_DATA)
