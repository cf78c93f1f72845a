"""What Shardwright does, in a minute: plan a GPT for eight H200s, then run two small models on two local processes.

Run it with ``make demo``.
"""

from __future__ import annotations

import subprocess
import sys


def shardwright(*arguments: str) -> None:
    """One command, shown before it runs."""
    print(f"\n$ shardwright {' '.join(arguments)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "shardwright", *arguments], check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    shardwright(
        "plan", "gpt:layers=24,width=2048,heads=16", "--cluster", "8xH200", "--batch", "16", "--dtype", "bfloat16"
    )
    shardwright("verify", "gpt:small", "--cluster", "local:2")
    shardwright("verify", "alexnet:small", "--cluster", "local:2")


if __name__ == "__main__":
    main()
