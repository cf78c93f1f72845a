"""Pictures for people."""

from shardwright.reports.picture import picture

__all__ = ["picture"]
