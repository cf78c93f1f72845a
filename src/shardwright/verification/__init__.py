"""Proof by running: plans against one process, operators whole against split, and how exact one process is itself."""

from __future__ import annotations

from shardwright.verification.compare import Comparison, Verification
from shardwright.verification.verify import Verified, verify

__all__ = ["Comparison", "Verification", "Verified", "verify"]
