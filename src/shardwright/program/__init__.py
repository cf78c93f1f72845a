"""What one rank does in one step, said once: then priced, timed, checked and run from there."""

from shardwright.program.build import build
from shardwright.program.decisions import Decisions, Noting, Sizes, Written
from shardwright.program.instructions import COMPUTE, Bucket, Instruction, Kind, Phase, Program

__all__ = [
    "COMPUTE",
    "Bucket",
    "Decisions",
    "Instruction",
    "Kind",
    "Noting",
    "Phase",
    "Program",
    "Sizes",
    "Written",
    "build",
]
