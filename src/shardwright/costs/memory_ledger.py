"""Storages with a beginning and an end, and the reference counts that decide when each one dies.

The clock is the number of the event of the walk; a storage lives from the start of event ``born`` to the end of event
``dies``. Born at -1 means: there before the step begins.
"""

from __future__ import annotations

from dataclasses import dataclass

PARAMETERS, OPTIMISER, BUFFERS, INPUTS = "parameters", "optimiser state", "buffers", "inputs"
GRADIENTS, ACTIVATIONS, FLOWING = "gradients", "activations", "activation gradients"
COMMUNICATION, TEMPORARIES, WORKSPACE = "communication buffers", "temporaries", "library workspace"
UNKNOWN = -2


@dataclass
class Storage:
    """Bytes with a beginning and an end. ``what`` and ``module`` say what they are for."""

    bytes: int
    kind: str
    what: str
    module: str
    born: int
    dies: int = UNKNOWN
    holders: int = 0


class Ledger:
    """All storages so far, and the time."""

    def __init__(self) -> None:
        self.clock = -1
        self.storages: list[Storage] = []

    def make(self, size: int, kind: str, what: str, module: str) -> Storage:
        """A storage that nobody holds yet."""
        self.storages.append(Storage(size, kind, what, module, self.clock))
        return self.storages[-1]

    def passing(self, size: int, kind: str, what: str, module: str, until: int | None = None) -> None:
        """Something that lives within the current event, or ``until`` a later one."""
        if size:
            self.make(size, kind, what, module).dies = max(self.clock, self.clock if until is None else until)

    def hold(self, storage: Storage) -> Storage:
        storage.holders += 1
        return storage

    def drop(self, *storages: Storage) -> None:
        """Let go; what nobody holds any more dies now."""
        for storage in storages:
            storage.holders -= 1
            if storage.holders == 0:
                storage.dies = max(storage.born, self.clock)

    def settle(self, first: int) -> None:
        """Of the storages from number ``first`` on, what nobody took hold of dies where it was made."""
        for storage in self.storages[first:]:
            if storage.holders == 0 and storage.dies == UNKNOWN:
                storage.dies = max(storage.born, self.clock)

    def close(self, end: int) -> list[Storage]:
        """Everything, in order of birth; what is still held lives to the end."""
        for storage in self.storages:
            if storage.dies == UNKNOWN:
                storage.dies = end
        return sorted(self.storages, key=_birth)


def _birth(storage: Storage) -> int:
    return storage.born
