"""Hardware that hands work over by itself against software that shares it anew between steps, simulated under speed
noise.

python -m bench.hardware_assistants > bench/measured/hardware_assistants.md

16 devices, 256 equal pieces a step, 60 steps, three seeds; one piece takes one second at speed 1. Latencies are in
pieces. Every number is the time of all steps over what is possible (all work over all speeds, as they were at those
moments).
"""

from __future__ import annotations

from shardwright.simulator.work_queues import Queues, Software, Speeds, Step, break_even, noisy_speeds, run_job

DEVICES, PIECES, STEPS, SEEDS = 16, 256, 60, 3
LATENCIES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
SCENES = (
    ("healthy, noise 10 % within a step", 1.0, 0.1, 2.0),
    ("healthy, noise 30 % within a step", 1.0, 0.3, 2.0),
    ("healthy, noise 30 % lasting one step", 1.0, 0.3, 16.0),
    ("healthy, noise 30 % lasting ten steps", 1.0, 0.3, 160.0),
    ("one device 2 × slower, no noise", 0.5, 0.0, 160.0),
    ("one device 2 × slower, noise 10 % within a step", 0.5, 0.1, 2.0),
    ("one device 2 × slower, noise 30 % within a step", 0.5, 0.3, 2.0),
    ("one device 4 × slower, noise 10 % lasting ten steps", 0.25, 0.1, 160.0),
)


def overhead(speeds: list[Speeds], software: bool, queues: Queues | None) -> float:
    """Time of all steps over what was possible in each of them, over all seeds."""
    took = could = 0.0
    for seed, speed in enumerate(speeds):
        steps: list[Step] = run_job(speed, PIECES, STEPS, Software() if software else None, queues, 1000 * seed)
        took += sum(step.seconds for step in steps)
        could += sum(speed.possible(step.start, PIECES) - step.start for step in steps)
    return took / could


def main() -> None:
    columns = " | ".join(f"{latency:g}" for latency in LATENCIES)
    print(
        f"| scene | equal shares | software | queues, latency {columns} | break-even with software | both, latency 1 |"
    )
    print("|---|" + "--:|" * (len(LATENCIES) + 4))
    for name, slow, noise, interval in SCENES:
        base = [slow, *[1.0] * (DEVICES - 1)]
        speeds = [noisy_speeds(base, noise, interval, 4.0 * STEPS * PIECES / DEVICES, seed) for seed in range(SEEDS)]
        equal, software = overhead(speeds, False, None), overhead(speeds, True, None)
        queues = [overhead(speeds, False, Queues(latency)) for latency in LATENCIES]
        both = overhead(speeds, True, Queues(1.0))
        meet = break_even(LATENCIES, queues, software)
        text = "never" if meet == 0 else f"> {LATENCIES[-1]:g}" if meet == float("inf") else f"{meet:.2f} pieces"
        cells = " | ".join(f"{value:.3f}" for value in queues)
        print(f"| {name} | {equal:.3f} | {software:.3f} | {cells} | {text} | {both:.3f} |", flush=True)
    print("\n| rule, one device 2 × slower, noise 30 % | latency 0 | 0.3 | 1 | 1, travel 0.5 a piece |")
    print("|---|--:|--:|--:|--:|")
    base = [0.5, *[1.0] * (DEVICES - 1)]
    speeds = [noisy_speeds(base, 0.3, 2.0, 4.0 * STEPS * PIECES / DEVICES, seed) for seed in range(SEEDS)]
    for victim in ("fullest", "random", "neighbour"):
        for amount in ("one", "half"):
            rules = [Queues(latency, 0.0, victim, amount) for latency in (0.0, 0.3, 1.0)]
            rules.append(Queues(1.0, 0.5, victim, amount))
            cells = " | ".join(f"{overhead(speeds, False, rule):.3f}" for rule in rules)
            print(f"| {victim}, {amount} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
