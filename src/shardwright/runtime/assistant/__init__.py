"""Watch the steps of a running job, share its work anew, keep the numbers."""

from shardwright.runtime.assistant.assistant import Assistant
from shardwright.runtime.assistant.starting import ask_for, assist
from shardwright.runtime.assistant.watching import Rule

__all__ = ["Assistant", "Rule", "ask_for", "assist"]
