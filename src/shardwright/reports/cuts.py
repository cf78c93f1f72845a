"""What a mesh axis does to an operator, in one word with one colour: the words all pictures and pages share.

The colours are Tol's bright scheme (Paul Tol, "Colour Schemes", SRON 2021), which people with any of the usual colour-vision
deficiencies can tell apart; every use of a colour also has its word beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.errors import PlanError
from shardwright.operators.rules import OpRules
from shardwright.records import shown

COLOURS = {
    "batch": "#4477aa",
    "sequence": "#66ccee",
    "spatial": "#228833",
    "features": "#ee6677",
    "sum": "#ccbb44",
    "open sum": "#aa3377",
    "whole": "#dddddd",
}
MEANING = {
    "batch": "cuts the batch",
    "sequence": "cuts the sequence",
    "spatial": "cuts the picture",
    "features": "cuts features or heads",
    "sum": "cuts a reduction",
    "open sum": "passes an unreduced sum",
    "whole": "whole on every rank",
}


def cut_of(loop: str | None, rules: OpRules, labels: Mapping[str, str]) -> str:
    """The word for one axis of an operator's split."""
    if loop is None:
        return "whole"
    if loop not in rules.by_name:
        raise PlanError(f"The plan cuts a loop {shown(loop)} of an operator that has none of that name.", "Plan again.")
    if not rules.by_name[loop].divides:
        return "open sum"
    if label := labels.get(loop, ""):
        return label
    reduces = any(type(out).__name__ == "Partial" for out in rules.by_name[loop].outputs)
    return "sum" if reduces else "features"
