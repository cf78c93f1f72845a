"""How wrong the cost model is: measured against predicted step time and peak memory, side by side.

python bench/accuracy.py measure -o measured.json     # on the machine with the accelerator; torch alone suffices
python bench/accuracy.py predict measured.json        # anywhere: prints the error table
python bench/accuracy.py report [--local]             # writes docs/benchmarks/accuracy.md
python bench/accuracy.py local                        # its section on two local processes only; a quiet machine, 3 minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import accuracy_cases


def _measure(output: Path, only: str) -> None:
    import torch

    torch.set_float32_matmul_precision("highest")
    properties = torch.cuda.get_device_properties(0)
    rows = []
    for case in accuracy_cases.CASES:
        if only not in case.name:
            continue
        row = accuracy_cases.measure(case)
        rows.append(row)
        print(f"{case.name}: {row.get('error') or _shown(row)}", flush=True)
        output.write_text(json.dumps({"device": properties.name, "torch": torch.__version__, "rows": rows}))


def _shown(row: dict[str, Any]) -> str:
    seconds = statistics.median(wall for wall, _ in row["repeats"])
    return f"{1e3 * seconds:.2f} ms, peak {row['peak_bytes'] / 2**30:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("-o", "--output", type=Path, required=True)
    measuring.add_argument("--only", default="")
    predicting = commands.add_parser("predict")
    predicting.add_argument("measured", type=Path)
    reporting = commands.add_parser("report")
    reporting.add_argument("--local", action="store_true", help="measure two local processes too")
    commands.add_parser("local", help="measure two local processes and rewrite their section of the page")
    asked = parser.parse_args()
    if asked.command == "measure":
        _measure(asked.output, asked.only)
    elif asked.command == "predict":
        import accuracy_table

        accuracy_table.main(asked.measured)
    else:
        import accuracy_report

        page = accuracy_report.write_local() if asked.command == "local" else accuracy_report.write(asked.local)
        print(f"written to {page}")


if __name__ == "__main__":
    main()
