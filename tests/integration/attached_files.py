"""Weights and files that tests of attachments publish, and what a store or a directory has of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toy_chain import first_state, next_state

from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store, keys

OPTIONS = WriterOptions(segment_bytes=800, threads=1, anchor_policy=AnchorPolicy(min_versions=100, max_versions=100))
OLD, NEW = b'{"rope": 1}', b'{"rope": 2}'


def states(count: int) -> list[Any]:
    found = [first_state()]
    for step in range(1, count):
        found.append(next_state(found[-1], step))
    return found


def files_in(folder: Path | None) -> dict[str, bytes]:
    """Return the files other than the weights of a checkpoint directory."""
    assert folder is not None
    own = ("deltawire.json", "model.safetensors.index.json")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors" and path.name not in own}


def objects(store: Store) -> set[str]:
    return {info.key for info in store.list(keys.DATA) if info.key.endswith(".file")}


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name.replace("_", ".")).write_bytes(data)
    return folder


def store_has_weights(store: Store, seq: int) -> bool:
    return any(info.key.endswith(".safetensors") for info in store.list(f"data/0000000001/{seq:020}/"))


def flip(store: Store, key: str) -> None:
    """Damage one bit of an object. Its size stays the same."""
    data = bytearray(store.get(key, limit=1 << 20))
    data[len(data) // 2] ^= 1
    store.delete([key])
    store.put(key, bytes(data))
