"""A cache of probed rules that is gone after the run."""

from __future__ import annotations

from operators.conftest import private_cache

__all__ = ["private_cache"]
