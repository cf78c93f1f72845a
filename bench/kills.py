"""A hundred kills -9 at random moments of writing plans, checkpoints and caches and of training: nothing lost or mixed.

``python -m bench.kills [KILLS] [SEED]``; see tests/runtime/kills.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    script = Path(__file__).parents[1] / "tests" / "runtime" / "kills.py"
    raise SystemExit(subprocess.run([sys.executable, str(script), *(sys.argv[1:] or ["100"])], check=False).returncode)


if __name__ == "__main__":
    main()
