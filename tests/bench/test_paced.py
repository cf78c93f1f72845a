"""Predictions compared with measurements on a host whose speed changes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cluster import Device, Profile
from shardwright.costs.pricing import Event
from shardwright.program import Instruction, Kind, Phase

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import paced

PROFILE = Profile("by hand", (), (("yardstick", 0.004, 0.006),))
DEVICE = Device("d", "cuda", 10**11, 1e12, 7e-6, (("float32", 1e13),), profile=PROFILE)


def events(host: float, seconds: float) -> list[Event]:
    return [Event(Instruction(Kind.OPERATOR, Phase.FORWARD, "a", "compute"), seconds, host) for _ in range(10)]


def test_a_slow_host_slows_what_it_bounds_and_nothing_else():
    repeats = [(1.0, 0.01), (2.0, 0.02), (3.0, 0.03)]
    bound = paced.compare(repeats, events(0.1, 1e-6), DEVICE)
    assert bound.predicted == pytest.approx((1.0, 2.0, 3.0), rel=1e-4)
    assert bound.paces == pytest.approx((1.0, 2.0, 3.0)) and bound.error == pytest.approx(0.0, abs=1e-4)
    free = paced.compare(repeats, events(1e-6, 0.1), DEVICE)
    assert free.predicted == pytest.approx((1.0, 1.0, 1.0), rel=1e-4)


def test_a_profile_that_does_not_know_its_pace_is_refused():
    with pytest.raises(ValueError, match="how fast its host was"):
        paced.compare([(1.0, 0.01)], events(0.1, 0.1), replace(DEVICE, profile=None))
