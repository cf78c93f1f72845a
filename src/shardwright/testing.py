"""For the tests of people who wrote their parallelism themselves: does it train as one process does?

>>> from shardwright.testing import assert_same_as_one_process                               # doctest: +SKIP
>>> def test_our_fsdp():                                                                     # doctest: +SKIP
...     assert_same_as_one_process(build_model, wrap_in_fsdp, processes=4)

``build_model()`` gives ``(model, args, kwargs)``, ``wrap_in_fsdp(model)`` the parallel module (or a
:class:`Candidate`, where it has a loop of its own). Both are functions of a module, as each local process imports them.
"""

from __future__ import annotations

from shardwright.verification.candidates import Candidate, Checked, check_candidate
from shardwright.verification.candidates.checking import STEPS, BuildCandidate
from shardwright.verification.prepare import Build

__all__ = ["Candidate", "assert_same_as_one_process"]


def assert_same_as_one_process(
    build: Build,
    candidate: BuildCandidate,
    *,
    processes: int = 4,
    steps: int = STEPS,
    seconds: float = 300.0,
    uneven_labels: bool = True,
) -> Checked:
    """Train a parallel module on local processes and its model on one; an ``AssertionError`` names the first difference.

    Parameters
    ----------
    build
        Gives ``(model, args, kwargs)``: a small model, and one batch for all ranks together.
    candidate
        Makes the parallel module of a model on every rank, inside a process group.
    seconds
        After which ranks that still wait for each other are ended.
    uneven_labels
        Whether some labels of a cross entropy become ignored ones, unevenly, where the batch has none.
    """
    checked = check_candidate(
        build, candidate, processes=processes, steps=steps, seconds=seconds, uneven_labels=uneven_labels
    )
    if not checked.agrees:
        raise AssertionError(checked.sentences())
    return checked
