"""A tiny sound chain that is written object by object as docs/protocol.md says. Tests of readers use it, so they need no publisher.

Tests of the chain's own rules use tests/unit/chain/hand_made_chain.py: it has fixed identifiers and a clock, and can write wrong records.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from blake3 import blake3
from safetensors.numpy import save

import deltawire
from deltawire.format.records.announcement_records import Announcement
from deltawire.format.records.file_list import FileListRef, list_bytes
from deltawire.format.records.record_parts import CommitRef, FileEntry, Limits, link_targets, record_hash
from deltawire.format.records.run_records import Epoch, Head, Run
from deltawire.format.records.version_records import Commit, Shortcut
from deltawire.store import Store, keys

State = dict[str, np.ndarray[Any, Any]]
NAMES = ("a.weight", "b.weight", "c.bias", "d.norm")


def first_state(seed: int = 0) -> State:
    """Return four small tensors of three types."""
    rng = np.random.default_rng(seed)
    return {
        "a.weight": rng.normal(size=(16, 24)).astype(ml_dtypes.bfloat16),
        "b.weight": rng.normal(size=(300,)).astype(ml_dtypes.bfloat16),
        "c.bias": rng.normal(size=(7,)).astype(np.float32),
        "d.norm": rng.integers(0, 200, size=(5, 3)).astype(np.uint8),
    }


def next_state(state: Mapping[str, Any], seed: int) -> State:
    """Return a state in which the bits of a few elements of each tensor, as integers, are one larger."""
    rng = np.random.default_rng(seed)
    new = {name: array.copy() for name, array in state.items()}
    for array in new.values():
        bits = array.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])
        bits[rng.choice(bits.size, size=max(1, bits.size // 20), replace=False)] += 1
    return new


class ToyChain:
    """Append versions to a store. `commits[seq]` and `states[seq]` are their expected content. Commit 0 is a fence.

    While `listed` is set, new records have file lists.
    """

    def __init__(self, store: Store, *, sign: Any = None, shards: int = 2, listed: bool = False) -> None:
        self.listed = listed
        self.store = store
        self.run = Run("toy", secrets.token_hex(16), 0, Limits())
        self.epoch = 1
        self.commits: list[Commit] = []
        self.states: list[State | None] = []
        self._sign = sign or (lambda record: record)
        self._shards = shards
        store.put_if_absent(keys.RUN, self.run.to_bytes())
        self.claim(1)

    def claim(self, epoch: int) -> Commit:
        """Claim an epoch for a new writer, and append its fence."""
        self.epoch = epoch
        self.store.put_if_absent(keys.epoch_key(epoch), Epoch(self.run.id, epoch, secrets.token_hex(16), 0, None).to_bytes())
        newest = self.newest
        if newest is None:
            return self._append(None, kind="fence", state_seq=None, digest=None, state_bytes=0, tensors=0, updates=0, base=None)
        assert newest.state_seq is not None
        state = self.states[newest.state_seq]
        return self._append(state, kind="fence", state_seq=newest.state_seq, base=self.ref(newest.seq), updates=newest.updates)

    @property
    def newest(self) -> Commit | None:
        return self.commits[-1] if self.commits else None

    @property
    def state(self) -> State:
        """Return the current state."""
        assert self.newest is not None
        assert self.newest.state_seq is not None
        state = self.states[self.newest.state_seq]
        assert state is not None
        return state

    def ref(self, seq: int) -> CommitRef:
        return self.commits[seq].ref(record_hash(self.commits[seq].to_bytes()))

    def anchor(self, state: State, *, extra: Mapping[str, bytes] | None = None) -> Commit:
        """Append a version with all its weights."""
        files = self.checkpoint(state, extra=extra)
        return self._append(state, kind="anchor", base=None, files=files)

    def delta(self, state: State | None = None, files: tuple[FileEntry, ...] | None = None) -> Commit:
        """Append a version as a delta to the current one. `files` are those of the delta if they are uploaded already."""
        assert self.newest is not None
        state = state if state is not None else next_state(self.state, len(self.commits))
        base = self.newest
        files = self.delta_files(self.state, state) if files is None else files
        return self._append(state, kind="delta", base=self.ref(base.seq), files=files, changed=1)

    def announcement(self, files: Sequence[FileEntry], **changes: Any) -> Announcement:
        """Return the announcement of a delta from the current version, signed if the chain is."""
        assert self.newest is not None
        fields = {"id": self.run.id, "epoch": self.epoch, "number": 0, "seq": len(self.commits), "base": self.ref(self.newest.seq)}
        announcement: Announcement = self._sign(Announcement(**{**fields, "files": tuple(files), **changes}))
        return announcement

    def announce(self, files: Sequence[FileEntry]) -> None:
        """Announce files of the next version."""
        self.store.put(keys.COMING, self.announcement(files).to_bytes())

    def grow(self, count: int) -> None:
        for _ in range(count):
            self.delta()

    def rewind(self, seq: int) -> Commit:
        """Make an earlier version current again."""
        return self._append(self.states[seq], kind="rewind", base=self.ref(seq))

    def add_anchor(self, seq: int) -> Shortcut:
        state = self.states[seq]
        assert state is not None
        return self._shortcut(keys.anchor_key(seq), seq, None, self.checkpoint(state, at=seq))

    def add_skip(self, seq: int, base: int) -> Shortcut:
        old, new = self.states[base], self.states[seq]
        assert old is not None
        assert new is not None
        return self._shortcut(keys.skip_key(seq, base), seq, base, self.delta_files(old, new, at=seq))

    def checkpoint(self, state: State, *, extra: Mapping[str, bytes] | None = None, at: int | None = None) -> tuple[FileEntry, ...]:
        """Upload a state as shards with an index."""
        names = sorted(state)
        parts = [names[i :: self._shards] for i in range(self._shards)]
        files = []
        weight_map = {}
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else "model.safetensors"
            weight_map.update(dict.fromkeys(part, file))
            data = save({name: state[name] for name in part})
            files.append(self.upload(data, "safetensors", at=at, raw=sum(state[name].nbytes for name in part), name=file))
        others = {} if self.listed else {"config.json": b'{"model_type": "toy"}', **(extra or {})}
        if len(parts) > 1:
            others["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        files += [self.upload(data, "file", at=at, raw=0, name=name) for name, data in others.items()]
        return tuple(files)

    def delta_files(self, old: State, new: State, *, at: int | None = None) -> tuple[FileEntry, ...]:
        """Upload a delta in two segments: the first tensor, and the others."""
        names = sorted(old)
        files = []
        for first, count in ((0, 1), (1, len(names) - 1)):
            part = names[first : first + count]
            data = deltawire.encode_delta({name: old[name] for name in part}, {name: new[name] for name in part})
            raw = sum(old[name].nbytes for name in part)
            files.append(self.upload(data, "safetensors", at=at, raw=raw, first=first, count=count))
        return tuple(files)

    def upload(self, data: bytes, suffix: str, *, at: int | None = None, raw: int, **more: Any) -> FileEntry:
        digest = blake3(data).hexdigest()
        key = keys.data_key(self.epoch, len(self.commits) if at is None else at, digest, suffix)
        self.store.put(key, data)
        return FileEntry(key, len(data), raw, digest, **more)

    def upload_list(self, files: tuple[FileEntry, ...]) -> FileListRef:
        data = list_bytes(files)
        key = f"{files[0].key.rpartition('/')[0]}/{blake3(data).hexdigest()}.file"
        self.store.put(key, data)
        return FileListRef(key, len(data), len(files), sum(entry.size for entry in files))

    def _append(self, state: State | None, *, kind: str, **more: Any) -> Commit:
        seq = len(self.commits)
        fields: dict[str, Any] = {
            "state_seq": seq,
            "updates": (self.newest.updates if self.newest else 0) + 1,
            "digest": None if state is None else deltawire.state_digest(state),
            "state_bytes": sum(array.nbytes for array in (state or {}).values()),
            "tensors": len(state or {}),
            "changed": 0,
            "files": (),
            "step": None if state is None else 10 * seq,
        } | more
        if self.listed and fields["files"]:
            config = () if kind == "fence" else (self.upload(b'{"model_type": "toy"}', "file", raw=0, name="config.json"),)
            fields |= {"run": "toy", "attachments": config, "file_list": self.upload_list(fields["files"]), "files": ()}
        commit = Commit(
            id=self.run.id,
            seq=seq,
            epoch=self.epoch,
            nonce=secrets.token_hex(16),
            kind=kind,
            parent=self.ref(seq - 1).commit if seq else None,
            links=tuple((m, self.ref(m).commit) for m in link_targets(seq)),
            time=1000 * seq,
            meta={"name": f"v{seq}"},
            **fields,
        )
        commit = self._sign(commit)
        self.store.put_if_absent(keys.commit_key(seq), commit.to_bytes())
        self.commits.append(commit)
        self.states.append(None if kind == "fence" else state)
        self.store.put(keys.HEAD, Head(seq).to_bytes())
        return commit

    def _shortcut(self, key: str, seq: int, base: int | None, files: tuple[FileEntry, ...]) -> Shortcut:
        target = self.commits[seq]
        shortcut = Shortcut(
            id=self.run.id,
            epoch=self.epoch,
            nonce=secrets.token_hex(16),
            time=0,
            target=self.ref(seq),
            base=None if base is None else self.ref(base),
            state_bytes=target.state_bytes,
            tensors=target.tensors,
            files=() if self.listed else files,
            file_list=self.upload_list(files) if self.listed else None,
        )
        shortcut = self._sign(shortcut)
        self.store.put_if_absent(key, shortcut.to_bytes())
        return shortcut

    def damage(self, entry: FileEntry) -> None:
        """Flip a bit in the middle of an object."""
        data = bytearray(self.store.get(entry.key, limit=1 << 30))
        data[len(data) // 2] ^= 1
        self.store.put(entry.key, bytes(data))

    def lose(self, entry: FileEntry) -> None:
        self.store.delete([entry.key])
