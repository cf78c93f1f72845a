"""Reading files takes the memory of what they hold."""

from __future__ import annotations

import gzip
import lzma
import tracemalloc

import pytest

from shardwright.errors import FileError
from shardwright.files import PART, read_bytes

HELD = b"words " * PART


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["plain", "gzip", "xz"])
def test_reading_allocates_what_is_read(tmp_path, pack):
    path = tmp_path / "file"
    path.write_bytes(pack(HELD))
    tracemalloc.start()
    try:
        assert read_bytes(path) == HELD
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(HELD), f"{peak} bytes for {len(HELD)}"
    assert read_bytes(path, largest=len(HELD)) == HELD
    with pytest.raises(FileError, match="more than"):
        read_bytes(path, largest=len(HELD) - 1)
