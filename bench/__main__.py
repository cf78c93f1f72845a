"""``python -m bench`` lists the claims; ``python -m bench NAME …`` (or ``make bench NAME=…``) runs them one after the other.

Without a name the quick ones are run: each prints its table with the ratio to a reference measured in the same run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
QUICK = ("choose_pase", "place_throughput", "operators_analysis", "pricing_speed", "simulator_speed", "capture_large")


def claims() -> dict[str, str]:
    """Every benchmark with a ``main``, and the first line of what it claims."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        text = path.read_text()
        if "def main(" in text and not path.name.startswith("__"):
            found[path.stem] = text.split('"""')[1].splitlines()[0]
    return found


def main() -> None:
    known = claims()
    names = sys.argv[1:] or list(QUICK)
    for name in names:
        if name not in known:
            listing = "\n".join(f"  {key}: {claim}" for key, claim in known.items())
            raise SystemExit(f"There is no benchmark {name!r}. There are:\n{listing}")
    for name in names:
        print(f"\n== {name}: {known[name]}", flush=True)
        subprocess.run([sys.executable, "-m", f"bench.{name}"], cwd=HERE.parent, check=False)


if __name__ == "__main__":
    main()
