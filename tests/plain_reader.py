"""A second, plain implementation of the reading side, from docs/protocol.md alone.

It reads slot by slot without shortcuts, and checks all.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
from blake3 import blake3
from support import copied, split_delta

import deltawire
from deltawire.dtypes import dtype_named
from deltawire.errors import ObjectMissing
from deltawire.store import Store


def read_json(store: Store, key: str) -> dict[str, Any] | None:
    try:
        data = store.get(key, limit=65536)
    except ObjectMissing:
        return None
    record = json.loads(data)
    assert data == json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return record | {"_hash": blake3(data).hexdigest()}


def read_commits(store: Store) -> list[dict[str, Any]]:
    """Return all commits, each checked against those before it. Void ones are marked."""
    commits: list[dict[str, Any]] = []
    epoch = 0
    while (commit := read_json(store, f"commit/{len(commits):020}.json")) is not None:
        seq = len(commits)
        assert commit["seq"] == seq
        assert commit["parent"] == (commits[-1]["_hash"] if commits else None)
        spans = [1 << k for k in range(1, 63) if seq and seq % (1 << k) == 0]
        assert commit["links"] == [[seq - span, commits[seq - span]["_hash"]] for span in spans]
        commit["_void"] = commit["epoch"] < epoch
        epoch = max(epoch, commit["epoch"])
        commits.append(commit)
    return commits


def read_states(store: Store) -> dict[int, dict[str, Any]]:
    """Return the state of every version, by its sequence number."""
    states: dict[int, dict[str, Any]] = {}
    commits = read_commits(store)
    in_force = [commit for commit in commits if not commit["_void"]]
    for before, commit in zip([None, *in_force], in_force, strict=False):
        base = commit["base"]
        if base is not None:
            assert base["commit"] == commits[base["seq"]]["_hash"]
            assert base["digest"] == commits[base["seq"]]["digest"]
        if commit["kind"] == "anchor":
            states[commit["seq"]] = read_checkpoint(store, files_of(store, commit))
        elif commit["kind"] == "delta":
            assert before is not None
            assert base["seq"] == before["seq"]
            states[commit["seq"]] = apply_files(store, states[before["state_seq"]], files_of(store, commit))
        elif commit["kind"] == "rewind":
            states[commit["seq"]] = states[commits[base["seq"]]["state_seq"]]
        if commit["kind"] != "fence":
            state = states[commit["seq"]]
            assert commit["state_seq"] == commit["seq"]
            assert commit["digest"] == deltawire.state_digest(state).hex()
            assert (commit["tensors"], commit["state_bytes"]) == (len(state), sum(array.nbytes for array in state.values()))
    return states


def files_of(store: Store, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the files that a record names itself or in its file list."""
    reference = record.get("list")
    if reference is None:
        files: list[dict[str, Any]] = record["files"]
        return files
    assert record["files"] == []
    folder, _, name = reference["key"].rpartition("/")
    data = read_file(store, reference | {"blake3": name.removesuffix(".file")})
    listed = json.loads(data)
    assert data == json.dumps(listed, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    assert (listed.keys(), listed["deltawire"], listed["version"]) == ({"deltawire", "version", "files"}, "files", 1)
    columns = ("blake3", "size", "raw", "name", "first", "count")
    files = [dict(zip(columns, row, strict=True)) for row in listed["files"]]
    for file in files:
        suffix = "safetensors" if file["name"] is None or file["name"].endswith(".safetensors") else "file"
        file["key"] = f"{folder}/{file['blake3']}.{suffix}"
    assert (len(files), sum(file["size"] for file in files)) == (reference["files"], reference["bytes"])
    return files


def apply_files(store: Store, state: dict[str, Any], files: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state that delta segments lead to."""
    result = copied(state)
    names = sorted(result)
    for file in files:
        part = {name: result[name] for name in names[file["first"] : file["first"] + file["count"]]}
        delta = read_file(store, file)
        assert file["raw"] == covered_bytes(delta, part)
        deltawire.apply_delta(part, delta)
    return result


def covered_bytes(delta: bytes, part: dict[str, Any]) -> int:
    """Return how many bytes of these tensors a delta file covers."""
    if delta[:8] != b"dwdelta3":
        parts = json.loads(json.loads(delta[8 : 8 + int.from_bytes(delta[:8], "little")])["__metadata__"].get("parts", "null"))
        spans = {name: (0, array.size) for name, array in part.items()} if parts is None else parts
        return sum((stop - start) * part[name].itemsize for name, (start, stop) in spans.items())
    parts = split_delta(delta).parts
    if not parts:
        return sum(array.nbytes for array in part.values())
    numbers, value, shift = [], 0, 0
    for byte in parts[8:]:
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    indices = [number + skipped for number, skipped in enumerate(itertools.accumulate(numbers[::3]))]
    names = sorted(part)
    return sum(part[names[index]].itemsize * elements for index, elements in zip(indices, numbers[2::3], strict=True))


def read_checkpoint(store: Store, files: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors in the shards of a checkpoint."""
    state: dict[str, Any] = {}
    for file in files:
        data = read_file(store, file)
        if not file["name"].endswith(".safetensors"):
            continue
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__")
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            state[name] = np.frombuffer(data[begin:end], dtype_named(entry["dtype"]).numpy).reshape(entry["shape"]).copy()
    return state


def read_file(store: Store, file: dict[str, Any]) -> bytes:
    data = store.get(file["key"], limit=file["size"])
    assert len(data) == file["size"]
    assert blake3(data).hexdigest() == file["blake3"] == file["key"].split("/")[-1].split(".")[0]
    return data
