"""Build chains record by record without a publisher, so that a test can also make them wrong in any way.

All identifiers are fixed, and the store has a clock that tests set. Tests that only need a sound chain use tests/toy_chain.py.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timedelta, timezone

import ml_dtypes
import numpy as np
from blake3 import blake3
from support import copied

from deltawire import encode_delta, state_digest
from deltawire.format.records.record_parts import CommitRef, FileEntry, Limits, link_targets, record_hash
from deltawire.format.records.run_records import Epoch, Head, Run
from deltawire.format.records.version_records import Commit, Shortcut
from deltawire.format.safetensors_header import build_header, place_in_order
from deltawire.store import keys
from deltawire.store.base import ObjectInfo
from deltawire.store.memory import MemoryStore
from deltawire.tensors.bits import tensor_bits

RUN_ID = "00112233445566778899aabbccddeeff"
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


class ClockedStore(MemoryStore):
    """A store in memory whose clock the test sets, and which counts requests."""

    def __init__(self) -> None:
        super().__init__("hand-made")
        self.now = NOW
        self.times = {}
        self.requests = []

    def get(self, key, *, limit):
        self.requests.append(("get", key))
        return super().get(key, limit=limit)

    def read_into(self, key, buffer, **options):
        self.requests.append(("read", key))
        super().read_into(key, buffer, **options)

    def list(self, prefix, *, after=None):
        self.requests.append(("list", prefix))
        return (self._at_its_time(info) for info in super().list(prefix, after=after))

    def head(self, key):
        return self._at_its_time(super().head(key))

    def put(self, key, data, **options):
        super().put(key, data, **options)
        self.times[key] = self.now

    def put_if_absent(self, key, data):
        super().put_if_absent(key, data)
        self.times[key] = self.now

    def pass_time(self, seconds):
        self.now += timedelta(seconds=seconds)

    def keys_under(self, prefix):
        return [info.key for info in super().list(prefix)]

    def _at_its_time(self, info):
        return ObjectInfo(info.key, info.size, self.times[info.key])


def make_state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "model.embed": rng.standard_normal((30, 8)).astype(ml_dtypes.bfloat16),
        "model.layer.0": rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16),
        "model.layer.1": rng.standard_normal((16, 16)).astype(np.float32),
        "model.norm": rng.standard_normal(16).astype(np.float16),
    }


def step(state, seed):
    """Return the next version, in which a few weights of some tensors have moved a little."""
    rng = np.random.default_rng(seed)
    new = copied(state)
    for name in list(new)[seed % 2 :: 2]:
        bits = new[name].reshape(-1).view(np.uint16)
        bits[rng.choice(bits.size, 5, replace=False)] += 1
    return new


def safetensors_bytes(state):
    tensors = [(name, tensor_bits(name, array).dtype, array.shape) for name, array in sorted(state.items())]
    placed = place_in_order(tensors)
    return build_header(placed, {"format": "pt"}) + b"".join(state[name].tobytes() for name, _ in placed)


class HandMadeChain:
    """A chain to which tests append commits. `states` keeps the state of each version."""

    def __init__(self, store=None, *, limits=None, sign=lambda record: record):
        self.store = store or ClockedStore()
        self.epoch = 0
        self.commits = []
        self.raw = []
        self.states = {}
        self.sign = sign
        self.store.put_if_absent(keys.RUN, Run("a run", RUN_ID, 1, limits or Limits()).to_bytes())

    @property
    def newest(self):
        """Return the newest commit that is not void."""
        top, found = 0, None
        for commit in self.commits:
            if commit.epoch >= top:
                top, found = commit.epoch, commit
        return found

    def ref(self, seq):
        return CommitRef(seq, record_hash(self.raw[seq]), self.commits[seq].digest)

    def claim(self):
        self.epoch += 1
        self.store.put_if_absent(keys.epoch_key(self.epoch), Epoch(RUN_ID, self.epoch, "e" * 32, 1, None).to_bytes())

    def fence(self):
        self.claim()
        last = self.newest
        base = None if last is None or last.digest is None else self.ref(last.seq)
        facts = {} if base is None else {"digest": last.digest, "state_bytes": last.state_bytes, "tensors": last.tensors}
        commit = self.append("fence", base=base, state_seq=last.state_seq if base else None, updates=last.updates if last else 0, **facts)
        if base is not None:
            self.states[commit.seq] = self.states[base.seq]
        return commit

    def anchor(self, state, files=None):
        return self._version("anchor", state, files or self.checkpoint_files(state))

    def delta(self, state, *, parts=2):
        base = self.newest
        files = self.delta_files(self.states[base.seq], state, parts)
        return self._version("delta", state, files, base=self.ref(base.seq), changed=5)

    def rewind(self, seq):
        return self._version("rewind", self.states[seq], (), base=self.ref(seq))

    def train(self, versions, *, parts=2):
        """Append this many deltas."""
        for _ in range(versions):
            last = self.newest
            self.delta(step(self.states[last.seq], last.seq + 1), parts=parts)
        return self.newest

    def skip(self, base, target):
        files = self.delta_files(self.states[base], self.states[target], 1)
        return self.add_shortcut(target, base, files)

    def anchor_shortcut(self, seq):
        return self.add_shortcut(seq, None, self.checkpoint_files(self.states[seq]))

    def add_shortcut(self, target, base, files):
        commit = self.commits[target]
        record = Shortcut(
            RUN_ID,
            self.epoch,
            "a" * 32,
            1,
            self.ref(target),
            base if base is None else self.ref(base),
            commit.state_bytes,
            commit.tensors,
            files,
        )
        record = self.sign(record)
        self.store.put_if_absent(keys.anchor_key(target) if base is None else keys.skip_key(target, base), record.to_bytes())
        return record

    def put_head(self, seq=None):
        self.store.put(keys.HEAD, Head(len(self.commits) - 1 if seq is None else seq).to_bytes())

    def append(self, kind, *, store=True, **facts):
        seq = len(self.commits)
        known = {
            "id": RUN_ID,
            "seq": seq,
            "epoch": self.epoch,
            "nonce": f"{seq:032x}",
            "kind": kind,
            "parent": record_hash(self.raw[-1]) if seq else None,
            "links": tuple((m, record_hash(self.raw[m])) for m in link_targets(seq)),
            "base": None,
            "state_seq": None,
            "updates": 0,
            "digest": None,
            "state_bytes": 0,
            "tensors": 0,
            "changed": 0,
            "step": seq,
            "time": 1000 * seq,
            "files": (),
            "meta": {},
        }
        commit = self.sign(Commit(**{**known, **facts}))
        self.commits.append(commit)
        self.raw.append(commit.to_bytes())
        if store:
            self.store.put_if_absent(keys.commit_key(seq), self.raw[-1])
        return commit

    def checkpoint_files(self, state):
        names = sorted(state)
        halves = [{name: state[name] for name in part} for part in (names[:2], names[2:])]
        files = [
            self.upload(safetensors_bytes(half), f"model-{i:05}-of-00002.safetensors", sum(a.nbytes for a in half.values()))
            for i, half in enumerate(halves, 1)
        ]
        index = {"weight_map": {name: files[names.index(name) >= 2].name for name in names}}
        return (*files, self.upload(json.dumps(index).encode(), "model.safetensors.index.json", 0))

    def delta_files(self, old, new, parts):
        names = sorted(new)
        files, first = [], 0
        for i in range(parts):
            count = (len(names) - first) // (parts - i)
            part = names[first : first + count]
            delta = encode_delta({name: old[name] for name in part}, {name: new[name] for name in part}, threads=1)
            files.append(self.upload(delta, None, sum(new[name].nbytes for name in part), first, count))
            first += count
        return tuple(files)

    def upload(self, data, name, raw, first=None, count=None):
        digest = blake3(data).hexdigest()
        suffix = "safetensors" if name is None or name.endswith(".safetensors") else "file"
        # Two publications never share an object, even if a test publishes the same bytes twice.
        key = keys.data_key(self.epoch, len(self.commits), digest, suffix)
        self.store.put(key, data)
        return FileEntry(key, len(data), raw, digest, name, first, count)

    def _version(self, kind, state, files, **facts):
        seq = len(self.commits)
        commit = self.append(
            kind,
            state_seq=seq,
            updates=self.newest.updates + 1,
            digest=state_digest(state),
            state_bytes=sum(array.nbytes for array in state.values()),
            tensors=len(state),
            files=tuple(files),
            **facts,
        )
        self.states[seq] = state
        return commit


def trained_chain(versions, **options):
    """Return a chain of a fence, an anchor (version 1) and this many deltas."""
    chain = HandMadeChain(**options)
    chain.fence()
    chain.anchor(make_state())
    chain.train(versions)
    return chain


def replaced(chain, seq, **changes):
    """Replace a commit by a changed one. Only a store that was tampered with can contain such a commit."""
    commit = dataclasses.replace(chain.commits[seq], **changes)
    chain.store.put(keys.commit_key(seq), commit.to_bytes())
    return commit
