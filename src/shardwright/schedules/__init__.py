"""Pipeline schedules as data: orders of actions per device, the known ones by name, timed by event simulation."""

from shardwright.schedules.classic import breadth_first, gpipe, interleaved_one_f_one_b, one_f_one_b
from shardwright.schedules.names import RECIPES, known_schedule
from shardwright.schedules.pipeline import Edge, Pipeline, pipeline
from shardwright.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from shardwright.schedules.shapes import stage_devices
from shardwright.schedules.timing import Timing, check_memory, run
from shardwright.schedules.torch_csv import read_csv, write_csv
from shardwright.schedules.v_shapes import dualpipe_v, v_half, v_min, zb_v
from shardwright.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT",
    "RECIPES",
    "WEIGHT",
    "Action",
    "Edge",
    "Pipeline",
    "Schedule",
    "Timing",
    "breadth_first",
    "check_memory",
    "dualpipe_v",
    "gpipe",
    "interleaved_one_f_one_b",
    "known_schedule",
    "one_f_one_b",
    "pipeline",
    "read_csv",
    "run",
    "stage_devices",
    "v_half",
    "v_min",
    "write_csv",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
