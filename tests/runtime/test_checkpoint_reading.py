"""Checkpoints from somebody else: crafted, torn or foreign ones are one sentence, and nothing in them is ever called."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from shardwright.errors import RunError
from shardwright.runtime.checkpoint import checkpoints, load_checkpoint, load_weights, save_checkpoint
from shardwright.runtime.checkpoint_reading import _CLASSES, _Unpickler, read_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *args) -> None:
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    return save_checkpoint(tmp_path / "run", 3, model, optimizer, {"epoch": 1}), model, optimizer


def test_what_was_saved_is_read(saved) -> None:
    folder, model, _ = saved
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    other, its = trained()
    assert load_checkpoint(folder.parent, other, its) == {"step": 3, "epoch": 1}
    for name, value in other.state_dict().items():
        assert torch.equal(value, expected[name]), name
    third, _ = trained()
    load_weights(third, folder)
    assert torch.equal(third[0].weight, expected["0.weight"])


@pytest.mark.parametrize("reads", ["resume", "weights"])
def test_metadata_that_calls_a_function_is_refused_and_calls_nothing(saved, tmp_path: Path, reads: str) -> None:
    folder, model, optimizer = saved
    (folder / ".metadata").write_bytes(pickle.dumps(Call(os.system, f"touch {tmp_path}/ran")))
    with pytest.raises(RunError, match=r"names 'posix\.system'"):
        load_checkpoint(folder.parent, model, optimizer) if reads == "resume" else load_weights(model, folder)
    assert not (tmp_path / "ran").exists()


def test_members_of_enumerations_are_read_as_python_3_11_2_writes_them_and_nothing_else_so(saved) -> None:
    """As ``getattr(kind, name)``, which could fetch anything."""
    folder, model, optimizer = saved
    layout = next(kind for (_, name), kind in _CLASSES.items() if name == "_MEM_FORMAT_ENCODING")
    found = _Unpickler(io.BytesIO(pickle.dumps(Call(getattr, layout, next(iter(layout)).name)))).load()
    assert found is next(iter(layout))
    for what in (Call(getattr, torch.Size, "__subclasses__"), Call(getattr, layout, "__reduce__")):
        (folder / ".metadata").write_bytes(pickle.dumps(what))
        with pytest.raises(RunError, match="getattr"):
            load_checkpoint(folder.parent, model, optimizer)


def test_a_name_with_a_line_break_stays_in_one_line(saved) -> None:
    folder, model, optimizer = saved
    (folder / ".metadata").write_bytes(b"cpathlib\nPosix\\nath\n.".replace(b"\\n", b"\r"))
    with pytest.raises(RunError) as raised:
        load_checkpoint(folder.parent, model, optimizer)
    assert len(raised.value.message.splitlines()) == 1


def test_a_value_that_calls_a_function_is_refused_and_calls_nothing(saved, tmp_path: Path) -> None:
    folder, model, _ = saved
    crafted = Call(os.system, f"touch {tmp_path}/ran")
    state = {"model": model.state_dict(), "random": torch.get_rng_state(), "extra": crafted}
    dcp.save(state, checkpoint_id=str(folder))
    with pytest.raises(RunError):
        load_checkpoint(folder.parent, model)
    assert not (tmp_path / "ran").exists()


def test_an_entry_outside_of_the_directory_is_refused(saved) -> None:
    folder, model, optimizer = saved
    data = read_metadata(folder)
    index = next(iter(data.storage_data))
    data.storage_data[index] = dataclasses.replace(data.storage_data[index], relative_path="../secret")
    (folder / ".metadata").write_bytes(pickle.dumps(data))
    with pytest.raises(RunError, match="outside of the directory"):
        load_checkpoint(folder.parent, model, optimizer)


@pytest.mark.parametrize("size", [0, 1, 50, 0.5])
def test_torn_metadata_is_one_sentence(saved, size: float) -> None:
    folder, model, optimizer = saved
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: int(size * len(data)) if size == 0.5 else int(size)])
    with pytest.raises(RunError, match="damaged"):
        load_checkpoint(folder.parent, model, optimizer)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_shard_is_one_sentence(saved, share: float) -> None:
    folder, model, optimizer = saved
    (shard,) = folder.glob("*.distcp")
    data = shard.read_bytes()
    shard.write_bytes(data[: int(share * len(data))])
    with pytest.raises(RunError, match="cannot be read") as caught:
        load_checkpoint(folder.parent, model, optimizer)
    assert "\n" not in caught.value.message


def test_a_tensor_said_to_be_a_value_is_one_sentence(saved) -> None:
    folder, model, optimizer = saved
    data = read_metadata(folder)
    data.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(data))
    with pytest.raises(RunError):
        load_checkpoint(folder.parent, model, optimizer)


def test_another_model_is_told_so(saved) -> None:
    folder, _, _ = saved
    with pytest.raises(RunError, match="does not fit this model"):
        load_checkpoint(folder.parent, torch.nn.Linear(9, 9))


def test_a_replaced_checkpoint_counts_until_the_new_one_has_its_name(saved) -> None:
    folder, model, optimizer = saved
    os.replace(folder, folder.with_suffix(".replaced"))  # killed between two renames
    assert checkpoints(folder.parent) == [folder.with_suffix(".replaced")]
    assert load_checkpoint(folder.parent, model, optimizer) == {"step": 3, "epoch": 1}
    save_checkpoint(folder.parent, 3, model, optimizer)
    assert checkpoints(folder.parent) == [folder]
    save_checkpoint(folder.parent, 3, model, optimizer)
    assert [path.name for path in folder.parent.iterdir()] == ["step-3"]
