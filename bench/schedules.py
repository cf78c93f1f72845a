"""Pipeline schedules: published bubble rates reproduced, and our scheduler against the published ones under the same memory.

python -m bench.schedules > bench/measured/schedules.md

Seconds are processor time of one core. Data: tests/data/schedules.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from tests.schedules.data import DATA, profiles, zero_bubble_rows

from shardwright.schedules import Pipeline, check_memory, known_schedule, pipeline, run
from shardwright.search.schedule import find_schedule


def rates() -> None:
    """Bubble rates of the known schedules beside the published ones and the textbook formula."""
    print(
        "| stages × micro | 1F1B published | simulated | textbook | ZB-H1 published | simulated | ZB-H2 | simulated |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    with open(DATA / "bubble_rates.csv") as file:
        for row in csv.DictReader(file):
            stages, microbatches = int(row["stages"]), int(row["microbatches"])
            times = [float(row[f"{key}_ms"]) for key in ("forward", "backward_input", "backward_weight", "hop")]
            priced = pipeline(range(stages), microbatches, *times)
            cells = []
            for name, column in (("1f1b", "one_f_one_b"), ("zb-h1", "zb_h1"), ("zb-h2", "zb_h2")):
                cells += [row[column], f"{run(known_schedule(name, stages, microbatches), priced).bubble:.4f}"]
            cells.insert(2, f"{(stages - 1) / (microbatches + stages - 1):.4f}")
            print(f"| {stages}, {microbatches} | {' | '.join(cells)} |", flush=True)


def problems() -> Iterator[tuple[str, float, float, float, Pipeline]]:
    """Name, listed span, makespan and seconds, and the pipeline, of every listed problem."""
    for row, problem in zero_bubble_rows():
        name = f"{row['scheduler']} {row['stages']} × {row['microbatches']}, {row['f_us']}/{row['b_us']}/{row['w_us']}"
        figures = (row["longest_stage_span_us"], row["makespan_us"], row["scheduler_seconds"])
        yield name, *map(float, figures), problem
    for name, listed, problem in profiles():
        yield name, listed["longest_stage_span"], listed["makespan"], listed["seconds"], problem


def main() -> None:
    rates()
    print("\n| problem | listed span | ours | of listed | bound | gap | seconds | (published) | makespan of listed |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, listed, makespan, published, problem in problems():
        found = find_schedule(problem)
        timing = run(found.answer, problem)
        check_memory(timing)
        gap = "optimal" if found.optimal else f"{100 * found.gap:.2f} %"
        print(
            f"| {name} | {listed:,.0f} | {found.cost:,.0f} | {found.cost / listed:.4f} | {found.lower_bound:,.0f} | {gap} "
            f"| {found.seconds:.2f} | {published:.3f} | {timing.makespan / makespan:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
