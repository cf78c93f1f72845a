"""Kill -9 at random moments: of writing a plan, saving a checkpoint, training, keeping something in a cache.

``python tests/runtime/kills.py KILLS [SEED]`` prints a line for each kind and exits with 1 if anything was lost. One process
imports everything and forks a child for each kill; the child does its work over and over until it dies. After every death
each file must be the old or the new one, whole; the training must have met, at every step it ever took, the loss of an
undisturbed run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

LONGEST = 0.4  # seconds a child lives at most
STEPS = 12


def killed(work: Callable[[], None], dice: random.Random, begun: Path, longest: float = LONGEST) -> bool:
    """Let a child work until it is killed; false where it had finished before."""
    begun.unlink(missing_ok=True)
    child = _forked(lambda: (begun.touch(), work()))
    while not begun.exists():
        time.sleep(0.001)
    time.sleep(dice.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _forked(work: Callable[[], object]) -> int:
    """A child that does its work and is gone, whatever comes of it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def finished(work: Callable[[], object]) -> None:
    """Let a child do its work to the end: where autograd has run once, it may refuse to run in forked processes."""
    if os.waitpid(_forked(work), 0)[1] != 0:
        raise RuntimeError("a child failed, see above")


def forever(*works: Callable[[], object]) -> Callable[[], None]:
    """All of them in turn, without end."""

    def work() -> None:
        while True:
            for one in works:
                one()

    return work


def plans(folder: Path, kills: int, dice: random.Random) -> list[str]:
    """``plan -o`` over an older plan."""
    from shardwright.files import check_writable
    from shardwright.planner import plan
    from shardwright.plans import Plan, to_json

    with torch.device("meta"):
        old = plan(torch.nn.Linear(64, 64), (torch.empty(8, 64),), cluster="2xH100")
    new = replace(old, notes=("new", "x" * 2_000_000))  # large, so that writing takes a while
    path, wrong = folder / "plan.json", []
    old.save(path)
    texts = {to_json(old), to_json(new)}

    def over(made: Plan) -> Callable[[], None]:
        return lambda: (check_writable(path), made.save(path))[1]

    for _ in range(kills):
        assert killed(forever(over(new), over(old)), dice, folder / "begun")
        if path.read_text() not in texts:
            wrong.append(f"a plan of {path.stat().st_size} bytes that nobody wrote")
    return wrong


def caches(folder: Path, kills: int, dice: random.Random) -> list[str]:
    """A calibration and a probed operator, kept over older ones."""
    from shardwright.caches import keep, read_cached

    os.environ["SHARDWRIGHT_CACHE"] = str(folder / "kept")
    contents, wrong = [(letter * 3_000_000).encode() for letter in "ab"], []
    for name in ("local.toml", "probed.json"):
        keep("kind", name, contents[0].decode())

    def over(name: str, content: bytes) -> Callable[[], object]:
        return lambda: keep("kind", name, content.decode())

    works = [over(name, content) for content in contents for name in ("local.toml", "probed.json")]
    for _ in range(kills):
        assert killed(forever(*works), dice, folder / "begun")
        wrong += [f"{n} in the cache" for n in ("local.toml", "probed.json") if read_cached("kind", n) not in contents]
    return wrong


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def checkpoints(folder: Path, kills: int, dice: random.Random) -> list[str]:
    """``save_checkpoint`` under new names and over an old one."""
    from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint

    model, optimizer = _model()
    wrong: list[str] = []

    def filled(value: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)

    def save(step: int, value: float) -> Callable[[], object]:
        return lambda: (filled(value), save_checkpoint(folder / "run", step, model, optimizer, {"value": value}))

    save(1, 1.0)()
    for _ in range(kills):
        assert killed(forever(save(1, 1.0), save(2, 2.0), save(2, 3.0), save(3, 4.0)), dice, folder / "begun")
        other, its = _model()
        found = load_checkpoint(folder / "run", other, its)
        if found is None:
            wrong.append("no checkpoint at all")
        elif any(not torch.equal(p, torch.full_like(p, found["value"])) for p in other.parameters()):
            wrong.append(f"a mixture at step {found['step']}")
    return wrong


def _train(folder: Path, log: Path) -> None:
    """Resume, train to the end, save every second step; every loss goes to the log."""
    from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint

    model, optimizer = _model()
    resumed = load_checkpoint(folder, model, optimizer)
    for step in range(resumed["step"] if resumed else 0, STEPS):
        x = torch.sin(
            torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32) * (step + 1)
        )  # another batch every step
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        with log.open("a") as file:
            file.write(f"{step} {loss.item()!r}\n")
        if step % 2 == 1:
            save_checkpoint(folder, step + 1, model, optimizer)


def training(folder: Path, kills: int, dice: random.Random) -> list[str]:
    """Training runs, each killed again and again and then let through."""
    began = time.perf_counter()
    finished(lambda: _train(folder / "undisturbed", folder / "expected"))
    life = time.perf_counter() - began
    expected = set((folder / "expected").read_text().splitlines())
    done, run, wrong = 0, 0, []
    while done < kills:
        place, log = folder / f"run-{run}", folder / f"log-{run}"
        for _ in range(min(5, kills - done)):
            done += killed(lambda place=place, log=log: _train(place, log), dice, folder / "begun", life)
        finished(lambda place=place, log=log: _train(place, log))
        lines = log.read_text().splitlines()
        # A kill may tear the line that was being written; it is then the beginning of a line that should stand there.
        wrong += [f"another loss: {line}" for line in lines if not any(known.startswith(line) for known in expected)]
        if {line.split()[0] for line in lines if line in expected} != {str(step) for step in range(STEPS)}:
            wrong.append("a step is missing")
        run += 1
    return wrong


KINDS = (training, plans, checkpoints, caches)
"""Training first: planning runs autograd in this process."""


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    dice = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    torch.set_num_threads(1)
    lost = 0
    print("| killed while | kills | lost or mixed |\n|---|---:|---:|", flush=True)
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            wrong = kind(Path(folder), kills // len(KINDS), dice)
        lost += len(wrong)
        print(f"| {kind.__name__} | {kills // len(KINDS)} | {len(wrong)} |", *wrong[:3], flush=True)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
