"""Whatever is in a file or on the command line: no traceback, no hang, no two gigabytes, no file elsewhere, no code run.

200 cases here; ``SHARDWRIGHT_FUZZ=10000 pytest tests/fuzz`` runs as many as you like, ``python -m bench fuzz`` counts them.
"""

from __future__ import annotations

import os

import pytest

from fuzz.everything import TARGETS
from fuzz.fuzzer import fuzz
from fuzz.targets import Target

CASES = int(os.environ.get("SHARDWRIGHT_FUZZ", "200"))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name.replace(" ", "-"))
def test_damaged_input_is_one_sentence(target: Target) -> None:
    result = fuzz(target, max(10, round(CASES * target.share)))
    assert result.cases
    assert not result.faults, "\n".join(f"{count}x {what}\n   {case}" for what, (count, case) in result.faults.items())
