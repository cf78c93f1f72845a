"""The one error hierarchy. Users see a sentence and a remedy, never a traceback.

Every error is raised with a message that quotes the offending value and a ``remedy`` that says what to do about it; the
command line prints both and exits with status 2.
"""

from __future__ import annotations


class ShardwrightError(Exception):
    """Something the user can act on: ``message`` says what is wrong, ``remedy`` what to try."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy


class FileError(ShardwrightError):
    """A file cannot be read or written."""


class GraphError(ShardwrightError):
    """A written graph is malformed."""


class CaptureError(ShardwrightError):
    """The model could not be turned into a graph."""


class DescriptionError(ShardwrightError):
    """An operator description is malformed."""


class ClusterError(ShardwrightError):
    """A cluster description is malformed or unknown."""


class ProblemError(ShardwrightError):
    """A search problem is malformed."""


class Infeasible(ShardwrightError):  # noqa: N818 - the conventional name of the condition
    """No answer satisfies the constraints; the message names the one that fails."""


class TooLarge(ShardwrightError):  # noqa: N818 - a refusal in advance, not a failure
    """An exact method would exceed its memory budget; callers fall back to another."""


class PlanError(ShardwrightError):
    """A plan is malformed, or was made for another model or cluster."""


class LoweringError(ShardwrightError):
    """A plan cannot be turned into a program; the message names the operator."""


class RunError(ShardwrightError):
    """Something went wrong between the ranks."""


class AssumptionBroken(RunError):  # noqa: N818 - it says what happened
    """The data of a batch takes another way through the model than the example did."""


class ModelError(ShardwrightError):
    """A model reference could not be resolved."""
