"""The worked example of docs/extending.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shardwright.verification.auditing import audit_call

from .custom import define

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


@pytest.mark.usefixtures("registry")
def test_the_worked_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 4
    torch.manual_seed(0)
    names: dict = {}
    for number, block in enumerate(blocks[:3]):
        exec(compile(block, f"extending.md block {number}", "exec"), names)
    assert names["audit"].runs >= 12

    define("normalise", lambda x: x / x.square().sum(1, keepdim=True).sqrt(), ["x"])
    exec(compile(blocks[3].replace("mylib", "shardwright_tests"), "extending.md block 3", "exec"), names)
    audit = audit_call("shardwright_tests::normalise", torch.randn(6, 8))
    assert audit.rules == 2 and audit.runs >= 6 and audit.disagreement is None
