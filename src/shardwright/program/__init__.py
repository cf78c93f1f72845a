"""What one rank does in one step, said once: then priced, timed, checked and run from there."""

from shardwright.program.build import build
from shardwright.program.decisions import Decisions, FixedDecisions, RecordingDecisions, Sizes
from shardwright.program.instructions import COMPUTE, Bucket, Instruction, Kind, Phase, Program

__all__ = [
    "COMPUTE",
    "Bucket",
    "Decisions",
    "FixedDecisions",
    "Instruction",
    "Kind",
    "Phase",
    "Program",
    "RecordingDecisions",
    "Sizes",
    "build",
]
