"""Checkpoints from somebody else: crafted, torn or foreign ones are one sentence, and nothing in them is ever called."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import os
import pickle
import random
import re
import zlib
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as parts

from shardwright.errors import RunError
from shardwright.runtime.checkpoint import checkpoints, load_checkpoint, load_weights, save_checkpoint
from shardwright.runtime.checkpoint_metadata import metadata_from
from shardwright.runtime.checkpoint_reading import read_metadata
from shardwright.runtime.checkpoint_sums import FILE

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


def crafted(folder: Path, metadata: bytes) -> None:
    """Other metadata, by somebody who knows of checksums."""
    (folder / ".metadata").write_bytes(metadata)
    sums = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**sums, "metadata": zlib.crc32(metadata)}))


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
    crafted(folder, pickle.dumps(Call(os.system, f"touch {tmp_path}/ran")))
    with pytest.raises(RunError, match=r"names 'posix\.system'"):
        load_checkpoint(folder.parent, model, optimizer) if reads == "resume" else load_weights(model, folder)
    assert not (tmp_path / "ran").exists()


def as_python_3_11_2(data: parts.Metadata, what: tuple = ()) -> bytes:
    """Members of enumerations as that Python pickles them, or ``what`` instead."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            member = isinstance(value, enum.Enum)
            return (getattr, what or (type(value), value.name)) if member else NotImplemented

    written = io.BytesIO()
    Pickler(written).dump(data)
    return written.getvalue()


def test_members_of_enumerations_are_read_as_python_3_11_2_writes_them_and_nothing_else_so(saved) -> None:
    """As ``getattr(kind, name)``, which could fetch anything."""
    folder, model, optimizer = saved
    expected = read_metadata(folder)
    older = as_python_3_11_2(expected)
    assert b"getattr" in older and metadata_from(older).state_dict_metadata == expected.state_dict_metadata
    for what in ((torch.Size, "__subclasses__"), (parts._MEM_FORMAT_ENCODING, "__reduce__")):
        crafted(folder, as_python_3_11_2(expected, what))
        with pytest.raises(RunError, match="getattr"):
            load_checkpoint(folder.parent, model, optimizer)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_is_read_as_every_python_writes_it(saved, protocol: int) -> None:
    folder, model, optimizer = saved
    with (folder / ".metadata").open("rb") as file:
        theirs = pickle.load(file)
    assert theirs.storage_meta is not None
    found = metadata_from(pickle.dumps(theirs, protocol=protocol))
    assert found.state_dict_metadata == theirs.state_dict_metadata
    assert found.storage_data == theirs.storage_data and found.planner_data == theirs.planner_data
    modern = pickle.dumps(theirs).replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")  # Python 3.13
    crafted(folder, modern)
    assert load_checkpoint(folder.parent, model, optimizer) == {"step": 3, "epoch": 1}


def test_metadata_that_changes_a_class_changes_nothing(saved, tmp_path: Path) -> None:
    """``BUILD`` sets attributes of whatever lies on the stack: ``parent`` of every path led elsewhere from then on."""
    folder, model, optimizer = saved
    raw, before = (folder / ".metadata").read_bytes(), PurePosixPath.__dict__.get("parent")
    head = b"cpathlib\nPurePosixPath\n(N}(\x8c\x06parent" + b"cpathlib\nPurePosixPath\n(\x8c\x05elsewtRutb0"
    try:
        crafted(folder, raw[:2] + head + raw[2:])
        with pytest.raises(RunError, match="damaged"):
            load_checkpoint(folder.parent, model, optimizer)
        assert Path("a/b").parent == Path("a")
    finally:
        if PurePosixPath.__dict__.get("parent") is not before:
            type.__setattr__(PurePosixPath, "parent", before) if before else type.__delattr__(PurePosixPath, "parent")


@pytest.mark.parametrize(
    "instructions",
    [
        b"Nr\xff\xff\xff\x7f.",  # a memo of two thousand million places
        b"\x8d" + (1 << 50).to_bytes(8, "little") + b"x.",
        b"}(" + b")" + b"2\x86" * 60 + b"Ku.",  # a key that takes for ever to be hashed
        b"(" * 100_000 + b".",
        b"h\x07.",
        b"\x8b\xff\xff\xff\xff.",
        b"N}b.",
        b"ctorch\nSize\nctorch\nSize\n)\x81}b\x81.",
        b"",
    ],
)
def test_instructions_that_no_pickler_writes_are_one_sentence(saved, instructions: bytes) -> None:
    folder, model, optimizer = saved
    crafted(folder, b"\x80\x04" + instructions)
    with pytest.raises(RunError, match="damaged"):
        load_checkpoint(folder.parent, model, optimizer)


def test_a_flipped_bit_is_noticed_wherever_it_is(saved) -> None:
    """Of 33 of them 20 were loaded as other values."""
    folder, model, optimizer = saved
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    generator, named = random.Random(0), 0
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for _ in range(40):
            bad, at = bytearray(good), generator.randrange(8 * len(good))
            bad[at // 8] ^= 1 << at % 8
            path.write_bytes(bad)
            try:
                load_checkpoint(folder.parent, model, optimizer)
            except RunError as error:
                assert "Remove this checkpoint" in error.remedy
                named += bool(
                    re.search(rf"damaged: (model|optimizer|random|extra)\S* in {path.name} is not", error.message)
                )
            for name, value in model.state_dict().items():
                assert torch.equal(value, expected[name]), (path, at)
        path.write_bytes(good)
    assert named > 20  # the others lie between entries, or in the metadata
    assert load_checkpoint(folder.parent, model, optimizer) == {"step": 3, "epoch": 1}


def test_a_checkpoint_that_lost_its_metadata_or_its_checksums_is_not_passed_over(saved) -> None:
    folder, model, optimizer = saved
    save_checkpoint(folder.parent, 4, model, optimizer)
    later, sums = folder.parent / "step-4", (folder.parent / "step-4" / FILE).read_text()
    (later / FILE).unlink()
    with pytest.raises(RunError, match="step-4 is damaged: its checksums are gone"):
        load_checkpoint(folder.parent, model, optimizer)
    (later / FILE).write_text(sums)
    (later / ".metadata").unlink()
    with pytest.raises(RunError, match=r"step-4 is damaged: its \.metadata is gone"):
        load_checkpoint(folder.parent, model, optimizer)
    save_checkpoint(folder.parent, 5, model, optimizer)  # a job that goes on may do so
    assert load_checkpoint(folder.parent, model, optimizer) == {"step": 5}


def test_checkpoints_without_checksums_are_read_with_one_line(saved, caplog: pytest.LogCaptureFixture) -> None:
    folder, model, optimizer = saved
    data = read_metadata(folder)
    del data.state_dict_metadata["checksums"]
    (folder / ".metadata").write_bytes(pickle.dumps(data))
    (folder / FILE).unlink()
    caplog.clear()
    assert load_checkpoint(folder.parent, model, optimizer) == {"step": 3, "epoch": 1}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "shardwright"]
    assert "has no checksums" in said


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], None),
        ([((0, 0), (4, 1)), ((0, 1), (4, 3))], None),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "overlap"),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], "overlap"),
        ([((0, 0), (2, 4))], "do not fill"),
        ([((0, 0), (2, 4)), ((3, 0), (2, 4))], "outside"),
        ([((0,), (4,))], "dims"),
    ],
)
def test_the_parts_of_a_tensor_fill_it(boxes: list, said: str | None) -> None:
    """What no part holds would stay as it was before."""
    chunks = [parts.ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes]
    entry = parts.TensorStorageMetadata(parts.TensorProperties(torch.float32), torch.Size((4, 4)), chunks)
    written = pickle.dumps(parts.Metadata({"x": entry}, storage_data={}))
    if said is None:
        assert metadata_from(written).state_dict_metadata == {"x": entry}
        return
    with pytest.raises(ValueError, match=said):
        metadata_from(written)


def test_a_name_with_a_line_break_stays_in_one_line(saved) -> None:
    folder, model, optimizer = saved
    crafted(folder, b"cpathlib\nPosix\\nath\n.".replace(b"\\n", b"\r"))
    with pytest.raises(RunError) as raised:
        load_checkpoint(folder.parent, model, optimizer)
    assert len(raised.value.message.splitlines()) == 1


def test_a_value_that_calls_a_function_is_refused_and_calls_nothing(saved, tmp_path: Path) -> None:
    folder, model, _ = saved
    evil = Call(os.system, f"touch {tmp_path}/ran")
    state = {"model": model.state_dict(), "random": torch.get_rng_state(), "extra": evil}
    dcp.save(state, checkpoint_id=str(folder))
    (folder / FILE).unlink()  # as of somebody else
    with pytest.raises(RunError):
        load_checkpoint(folder.parent, model)
    assert not (tmp_path / "ran").exists()


def test_an_entry_outside_of_the_directory_is_refused(saved) -> None:
    folder, model, optimizer = saved
    data = read_metadata(folder)
    index = next(iter(data.storage_data))
    data.storage_data[index] = dataclasses.replace(data.storage_data[index], relative_path="../secret")
    crafted(folder, pickle.dumps(data))
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
    with pytest.raises(RunError, match=r"damaged|cannot be read") as caught:
        load_checkpoint(folder.parent, model, optimizer)
    assert "\n" not in caught.value.message


def test_a_tensor_said_to_be_a_value_is_one_sentence(saved) -> None:
    folder, model, optimizer = saved
    data = read_metadata(folder)
    data.state_dict_metadata["model.0.weight"] = parts.BytesStorageMetadata()
    crafted(folder, pickle.dumps(data))
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


def test_a_full_disk_is_one_sentence_and_the_checkpoints_before_stay(
    saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given, **options):
        raise OSError(28, "No space left on device")

    _, model, optimizer = saved
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    with pytest.raises(RunError, match=r"step-4' cannot be written: No space left on device\. Free space"):
        save_checkpoint(tmp_path / "run", 4, model, optimizer)
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "run", model, optimizer)["step"] == 3
