"""Tiny tensors on one thread, and a cache of probed rules that is gone after the run."""

from __future__ import annotations

from operators.conftest import one_thread, private_cache

__all__ = ["one_thread", "private_cache"]
