"""Parallel modules that others wrote, against one process: run as they are, compared, and the cause of a difference
named."""

from __future__ import annotations

from shardwright.verification.candidates.checking import Checked, check_candidate
from shardwright.verification.candidates.protocol import Candidate

__all__ = ["Candidate", "Checked", "check_candidate"]
