"""Plain torchrun on two hosts (emulated: namespaces at 100 Mbit/s) trains to the same loss as on one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from emulated_hosts import ADDRESSES, hosts, on_host, why_not
from runtime.test_killed_ranks import SCRIPT, STEPS, plan_file, train

__all__ = ["plan_file"]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_hosts(plan_file, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    expected = train(plan_file, alone, [])
    with hosts("100mbit") as names:
        processes = []
        for number, name in enumerate(names):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
            torchrun += ["--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=29577"]
            processes.append(on_host(name, [*torchrun, str(SCRIPT), str(plan_file), str(together), str(STEPS)]))
        errors = [process.communicate(timeout=200)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), errors[0][-2000:] + errors[1][-2000:]
    assert float((together / "final").read_text()) == pytest.approx(expected, rel=1e-6)
