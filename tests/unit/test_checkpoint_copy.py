"""Test copying a checkpoint to one that can be changed, and moving the copy to its final path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from deltawire.dtypes import dtype_named
from deltawire.errors import CheckpointError, DtypeMismatch, ShapeMismatch, TensorMissing, TensorUnexpected
from deltawire.format.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from deltawire.format.checkpoints.checkpoint_copy import copy_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def base_file(tmp_path: Path) -> Path:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4).astype(ml_dtypes.bfloat16),
        "c": np.arange(3, dtype=np.int8),
    }
    save_file(tensors, tmp_path / "base.safetensors", metadata={"format": "pt", "step": "7"})
    return tmp_path / "base.safetensors"


@pytest.fixture
def base_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    save_file({"a": np.arange(6, dtype=np.float32)}, directory / FIRST, metadata={"format": "pt"})
    save_file({"b": np.arange(4, dtype=np.int8), "c": np.arange(5, dtype=np.float16)}, directory / SECOND)
    index = {"metadata": {"total_size": 38, "total_parameters": 15, "note": "kept"}, "weight_map": {"c": SECOND, "a": FIRST, "b": SECOND}}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text("{}")
    (directory / ".cache").mkdir()
    (directory / ".cache" / "lock").write_text("")
    (directory / "pytorch_model.bin").write_bytes(b"other weights")
    (directory / "consolidated.safetensors").write_bytes(b"other weights")
    (directory / "pytorch_model.bin.index.json").write_text("{}")
    return directory


def names_beside(path: Path) -> set[str]:
    return {entry.name for entry in path.parent.iterdir()}


def bf16(values: list[float]) -> NDArray[Any]:
    return np.array(values).astype(ml_dtypes.bfloat16)


def test_a_file_that_keeps_its_tensors_is_copied_byte_for_byte(base_file: Path) -> None:
    out = base_file.with_name("out.safetensors")
    with copy_checkpoint(Checkpoint(base_file), out) as state:
        assert not out.exists()
        state.commit()
    assert out.read_bytes() == base_file.read_bytes()
    assert names_beside(out) == {"base.safetensors", "out.safetensors"}


def test_writes_to_arrays_reach_the_copy_and_not_the_source(base_file: Path) -> None:
    before = base_file.read_bytes()
    out = base_file.with_name("out.safetensors")
    with copy_checkpoint(Checkpoint(base_file), out) as state:
        state["a"][1, 2] = 50
        state["b"].view(np.uint16)[0] = 0x8000
        state.commit()
    found = load_file(out)
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 50]]
    assert found["b"].view(np.uint16)[0] == 0x8000
    assert base_file.read_bytes() == before


def test_tensors_are_dropped_added_and_reshaped(base_file: Path) -> None:
    out = base_file.with_name("out.safetensors")
    add = {"b": (dtype_named("F32"), (2,)), "d": (dtype_named("BF16"), (2, 1)), "empty": (dtype_named("I8"), (0, 3))}
    with copy_checkpoint(Checkpoint(base_file), out, drop={"b", "c"}, add=add) as state:
        assert sorted(state) == ["a", "b", "c"]
        assert state["b"].dtype == ml_dtypes.bfloat16
        assert state["c"].tolist() == [0, 1, 2]
        assert "d" not in state
        with pytest.raises(KeyError):
            state["d"]
        del state["b"]
        del state["c"]
        assert "b" not in state
        with pytest.raises(KeyError):
            state["b"]
        with pytest.raises(KeyError):
            del state["c"]
        state["b"] = np.array([1.5, -2], np.float32)
        state["d"] = bf16([3, 4]).reshape(2, 1)
        state["empty"] = np.zeros((0, 3), np.int8)
        state["d"][1, 0] = 9
        assert sorted(state) == ["a", "b", "d", "empty"]
        assert len(state) == 4
        state.commit()
    found = load_file(out)
    assert {name: array.tolist() for name, array in found.items()} == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": [1.5, -2],
        "d": [[3], [9]],
        "empty": [],
    }
    assert found["empty"].shape == (0, 3)
    with safe_open(out, "np") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}


def test_every_tensor_of_a_copy_is_aligned_even_if_the_order_must_change(tmp_path: Path) -> None:
    save_file({"x": np.arange(3, dtype=np.int8)}, tmp_path / "base.safetensors")
    out = tmp_path / "out.safetensors"
    with copy_checkpoint(Checkpoint(tmp_path / "base.safetensors"), out, add={"y": (dtype_named("F64"), (2,))}) as state:
        state["y"] = np.array([1.0, 2.0])
        assert state["y"].flags.aligned
        state.commit()
    assert load_file(out)["x"].tolist() == [0, 1, 2]
    assert load_file(out)["y"].tolist() == [1, 2]


def test_an_unaligned_source_becomes_an_aligned_copy(tmp_path: Path) -> None:
    text = b'{"w":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}'
    text += b" " * (3 - len(text) % 8)
    (tmp_path / "base.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + (77).to_bytes(8, "little"))
    with copy_checkpoint(Checkpoint(tmp_path / "base.safetensors"), tmp_path / "out.safetensors") as state:
        assert state["w"].flags.aligned
        assert state["w"].flags.writeable
        assert state["w"].tolist() == [77]


def test_a_directory_keeps_its_files_and_its_index(base_directory: Path) -> None:
    out = base_directory.with_name("out")
    with copy_checkpoint(Checkpoint(base_directory), out) as state:
        assert state.left_out == ["consolidated.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"]
        state.commit()
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        FIRST, SECOND, INDEX_FILE, "config.json", "1_Pooling/config.json",
    }  # fmt: skip
    for name in (FIRST, SECOND, INDEX_FILE, "config.json"):
        assert (out / name).read_bytes() == (base_directory / name).read_bytes()


def test_the_index_follows_tensors_that_come_and_go(base_directory: Path) -> None:
    out = base_directory.with_name("out")
    with copy_checkpoint(Checkpoint(base_directory), out, drop={"b", "a"}, add={"a": (dtype_named("F64"), (2,))}) as state:
        del state["a"], state["b"]
        state["a"] = np.array([1.0, 2.0])
        state.commit()
    index = json.loads((out / INDEX_FILE).read_text())
    assert index == {"metadata": {"total_size": 26, "total_parameters": 7, "note": "kept"}, "weight_map": {"a": SECOND, "c": SECOND}}
    assert not (out / FIRST).exists()
    assert {name: array.tolist() for name, array in Checkpoint(out).items()} == {"a": [1, 2], "c": [0, 1, 2, 3, 4]}


def test_a_directory_with_one_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    save_file({"w": np.zeros(2)}, tmp_path / "base" / SINGLE_FILE)
    with copy_checkpoint(Checkpoint(tmp_path / "base"), tmp_path / "out") as state:
        state["w"][:] = 3
        state.commit()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [SINGLE_FILE]
    assert Checkpoint(tmp_path / "out")["w"].tolist() == [3, 3]


def test_a_companion_that_links_outside_is_refused_and_nothing_stays(base_directory: Path) -> None:
    secret = base_directory.with_name("secret")
    secret.write_text("secret")
    (base_directory / "tokenizer.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match="leads out"):
        copy_checkpoint(Checkpoint(base_directory), base_directory.with_name("out"))
    assert names_beside(base_directory) == {"base", "secret"}


def test_leaving_without_commit_leaves_nothing(base_file: Path, base_directory: Path) -> None:
    before = names_beside(base_file)
    for base in (base_file, base_directory):
        with pytest.raises(RuntimeError), copy_checkpoint(Checkpoint(base), base.with_name("out")):
            raise RuntimeError
    assert names_beside(base_file) == before


def test_a_change_must_be_finished_before_commit(base_file: Path) -> None:
    out = base_file.with_name("out")
    add = {"n": (dtype_named("U8"), (1,))}
    with copy_checkpoint(Checkpoint(base_file), out, drop={"a"}, add=add) as state, pytest.raises(CheckpointError, match=r"\['a', 'n'\]"):
        state.commit()
    assert names_beside(base_file) == {"base.safetensors"}


def test_only_what_was_announced_can_be_set_or_deleted(base_file: Path) -> None:
    with copy_checkpoint(Checkpoint(base_file), base_file.with_name("out"), add={"n": (dtype_named("BF16"), (2,))}) as state:
        with pytest.raises(CheckpointError, match="no room is reserved for tensor 'm'"):
            state["m"] = np.zeros(1)
        with pytest.raises(CheckpointError, match="no room is reserved for tensor 'a'"):
            state["a"] = np.zeros((2, 3), np.float32)
        with pytest.raises(CheckpointError, match="has room for tensor 'a'"):
            del state["a"]
        with pytest.raises(DtypeMismatch):
            state["n"] = np.zeros(2, np.float16)
        with pytest.raises(ShapeMismatch):
            state["n"] = bf16([1])


def test_names_that_do_not_fit_the_source_are_refused(base_file: Path) -> None:
    source, out = Checkpoint(base_file), base_file.with_name("out")
    with pytest.raises(TensorMissing, match="'nothing'"):
        copy_checkpoint(source, out, drop={"nothing"})
    with pytest.raises(TensorUnexpected, match="'a'"):
        copy_checkpoint(source, out, add={"a": (dtype_named("F32"), (2, 3))})
    assert names_beside(base_file) == {"base.safetensors"}


def test_an_output_that_exists_is_refused(base_file: Path, base_directory: Path) -> None:
    out_file, out_directory = base_file.with_name("out.safetensors"), base_file.with_name("out")
    out_file.write_text("precious")
    out_directory.mkdir()
    for base, out in ((base_file, out_file), (base_directory, out_directory)):
        with pytest.raises(CheckpointError, match="exists already"):
            copy_checkpoint(Checkpoint(base), out)
    assert out_file.read_text() == "precious"


def test_an_output_that_appears_meanwhile_is_not_overwritten(base_file: Path) -> None:
    out = base_file.with_name("out.safetensors")
    with copy_checkpoint(Checkpoint(base_file), out) as state:
        out.write_text("precious")
        with pytest.raises(CheckpointError, match="exists already"):
            state.commit()
    assert out.read_text() == "precious"
    assert names_beside(out) == {"base.safetensors", "out.safetensors"}


def test_replacing_puts_the_new_checkpoint_where_the_old_one_was(base_file: Path, base_directory: Path) -> None:
    out_file, out_directory = base_file.with_name("out.safetensors"), base_file.with_name("out")
    out_file.write_text("old")
    out_directory.mkdir()
    (out_directory / INDEX_FILE).write_text("old")
    before = names_beside(base_file)
    for base, out in ((base_file, out_file), (base_directory, out_directory)):
        with copy_checkpoint(Checkpoint(base), out, replace=True) as state:
            assert out.exists()
            state.commit()
        assert list(Checkpoint(out)) == list(Checkpoint(base))
    assert names_beside(base_file) == before


def test_replacing_never_deletes_what_is_not_a_checkpoint(base_directory: Path) -> None:
    source, out = Checkpoint(base_directory), base_directory.with_name("out")
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        copy_checkpoint(source, out, replace=True)
    (out / INDEX_FILE).write_text("{}")
    (out / ".git").mkdir()
    with pytest.raises(CheckpointError, match=r"holds \.git and 1 more, which would be lost"):
        copy_checkpoint(source, out, replace=True)
    late = base_directory.with_name("late")
    with copy_checkpoint(source, late, replace=True) as state:
        out.rename(late)  # the output did not exist when the copy began
        with pytest.raises(CheckpointError, match="would be lost"):
            state.commit()
    late.rename(out)
    link = base_directory.with_name("link")
    link.symlink_to(out)
    with pytest.raises(CheckpointError, match="is a link"):
        copy_checkpoint(source, link, replace=True)
    (base_directory.with_name("file")).write_text("precious")
    with pytest.raises(CheckpointError, match="is a file"):
        copy_checkpoint(source, base_directory.with_name("file"), replace=True)
    assert (out / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("out", ["base", "base/out", "base/1_Pooling/../out", ".", "link", "link/out", "../{parent}"])
def test_an_output_that_overlaps_the_base_is_refused(base_directory: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(base_directory.parent)
    Path("link").symlink_to("base")
    with pytest.raises(CheckpointError, match="Name an output elsewhere"):
        copy_checkpoint(Checkpoint(Path("base")), Path(out.format(parent=base_directory.parent.name)), replace=True)
    assert names_beside(base_directory) == {"base", "link"}


def test_a_missing_parent_is_named(base_file: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        copy_checkpoint(Checkpoint(base_file), base_file.parent / "nowhere" / "out")
    assert str(caught.value.filename).endswith("nowhere")


def test_a_source_that_shrinks_while_it_is_copied_is_an_error(base_file: Path) -> None:
    source = Checkpoint(base_file)
    base_file.write_bytes(base_file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        copy_checkpoint(source, base_file.with_name("out"))
    assert names_beside(base_file) == {"base.safetensors"}


def test_progress_counts_the_bytes_of_the_copy(base_file: Path) -> None:
    seen: list[int] = []
    with copy_checkpoint(
        Checkpoint(base_file), base_file.with_name("out"), drop={"c"}, add={"n": (dtype_named("U8"), (5,))}, progress=seen.append
    ):
        assert sum(seen) == 24 + 8 + 5


def test_a_copy_that_the_disk_cannot_hold_is_refused_before_it_is_begun(base_file: Path) -> None:
    with pytest.raises(CheckpointError, match="needs 8,796,093,022,2"):
        copy_checkpoint(Checkpoint(base_file), base_file.with_name("out"), add={"huge": (dtype_named("F64"), (1 << 40,))})
    assert names_beside(base_file) == {"base.safetensors"}


def test_a_snapshot_of_the_hub_cache_becomes_real_files(tmp_path: Path, base_directory: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for name in (FIRST, SECOND, INDEX_FILE, "config.json"):
        (base_directory / name).rename(tmp_path / "blobs" / f"hash-of-{name}")
        (snapshot / name).symlink_to(f"../../blobs/hash-of-{name}")
    with copy_checkpoint(Checkpoint(snapshot), tmp_path / "out") as state:
        state["a"][0] = 100
        state.commit()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([FIRST, SECOND, INDEX_FILE, "config.json"])
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert Checkpoint(snapshot)["a"][0] == 0
