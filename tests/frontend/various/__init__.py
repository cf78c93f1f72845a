"""Models that people train and that are not Hugging Face's, each in a few lines: a test of "any model", not of accuracy.

``build(name)`` gives ``(model, args, kwargs)``; what a model returns is its loss, or outputs to make one of.
"""

from __future__ import annotations

from tests.frontend.various import images, relations, science, sequences, trainings, vision
from tests.frontend.various.registry import MODELS, build

__all__ = ["MODELS", "build", "images", "relations", "science", "sequences", "trainings", "vision"]
