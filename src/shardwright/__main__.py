"""``python -m shardwright`` is the ``shardwright`` command."""

from shardwright.cli import main

main()
