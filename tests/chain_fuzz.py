"""Test all readers with hostile chains whose hashes are right. A small sound chain is changed and linked again.

    python tests/chain_fuzz.py --seeds 1000          # seeds 0 to 999
    python tests/chain_fuzz.py --first 4711          # one seed, and what it changes

Readers refuse a damaged record because of its hash. Here the hashes of parents, links, bases, targets and files are computed after the
change, so that readers reach the change itself. Anyone who can write to the store can do that to an unsigned chain. These rules hold for
every reader:

- It succeeds, and has the weights of the version's digest; or it raises a `DeltawireError`. Any other exception is a finding.
- It ends. The store refuses more calls than any sound reader makes (`TooManyCalls`), and a watchdog ends the process.
- It allocates no memory only because a record asks for it. The address space may grow by `MEMORY` only.
- After a publisher has taken such a chain over and published, readers that succeed have what it published.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import json
import random
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3
from support import bits_of, join_delta, split_delta
from toy_chain import ToyChain, first_state, next_state

import deltawire
from deltawire.chain.find import find_step, find_version
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.routes import Routes
from deltawire.cli.chain_history import read_history
from deltawire.errors import DeltawireError
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.records.collection_records import Mark, Pin
from deltawire.format.records.record_parts import link_targets
from deltawire.publish import AnchorPolicy, Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store, keys
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.pull import pull

CALLS = 4000
"""The number of calls of the store that one reader may make. On the sound chain no reader makes a tenth of them."""
MEMORY = 2 << 30
SECONDS = 600
"""The number of seconds for one seed, even on a busy machine. Only work that never ends takes that long."""

Record = dict[str, Any]


class TooManyCalls(BaseException):
    """A reader made too many calls. This is not an `Exception`, so that no code retries it."""


class CountingStore(WrappedStore):
    """A store that raises when it was called too often."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls = 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls > CALLS:
            raise TooManyCalls(f"more than {CALLS} calls of the store")

    def get(self, key: str, *, limit: int) -> bytes:
        self._count()
        return super().get(key, limit=limit)

    def head(self, key: str) -> Any:
        self._count()
        return super().head(key)

    def read_into(self, key: str, buffer: memoryview, **options: Any) -> None:
        self._count()
        super().read_into(key, buffer, **options)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._count()
        super().put_if_absent(key, data)

    def put(self, key: str, data: Any, **options: Any) -> None:
        self._count()
        super().put(key, data, **options)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[Any]:
        self._count()
        return super().list(prefix, after=after)

    def delete(self, keys: Any) -> None:
        self._count()
        super().delete(keys)

    def close(self) -> None:
        pass


@dataclass
class Soup:
    """A chain as JSON before it is linked, which mutations change. `commits` are in the order of their slots."""

    run: Record
    commits: list[Record]
    others: dict[str, Record]
    """Epochs, shortcuts, marks, pins and HEAD, by key."""
    data: dict[str, bytes]
    done: list[str] = field(default_factory=list)
    """Descriptions of the changes, for people."""
    unlinked: bool = False
    """Whether the hashes also stay as they are."""


def _json(data: bytes) -> Record:
    record: Record = json.loads(data)
    return record


def _canonical(record: Record) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


Template = tuple[dict[str, bytes], dict[str, Any]]
"""The objects of a sound chain, and the weights of each digest."""


def _template(seed: int) -> Template:
    """Return the chain to change: for every fourth seed one that a publisher wrote, for the others one that was written by hand."""
    return _published() if seed % 4 == 3 else _handmade()


@cache
def _published() -> Template:
    """Publish a chain with three publishers. The second takes over with other attachments, and the third resumes from an older version."""
    store = MemoryStore()
    states = [first_state()]
    for number in range(14):
        states.append(next_state(states[-1], number))
    options = WriterOptions(segment_bytes=500, anchor_policy=AnchorPolicy(4, 6))
    with Publisher(store, attachments={"config.json": b"{}", "chat_template.jinja": b"a"}, options=options) as publisher:
        versions: list[Any] = [publisher.publish(state, step=step) for step, state in enumerate(states[:8])]
    with Publisher(store, attachments={"config.json": b"{}", "chat_template.jinja": b"b"}, options=options) as publisher:
        versions += [publisher.publish(state, step=8 + step) for step, state in enumerate(states[8:11])]
    with Publisher(store, resume_from=versions[-2].seq, options=options) as publisher:
        versions += [publisher.publish(state, step=10 + step) for step, state in enumerate(states[11:])]
    store.put(keys.pin_key("reader"), Pin(ChainLog(store).run.id, "reader", 8, 3600).to_bytes())
    weights = {deltawire.state_digest(state).hex(): bits_of(state) for state in states}
    return {info.key: store.get(info.key, limit=1 << 30) for info in store.list("")}, weights


@cache
def _handmade() -> Template:
    """Write a chain with all kinds of commits and objects."""
    store = MemoryStore()
    chain = ToyChain(store)
    chain.anchor(first_state())
    chain.grow(3)
    chain.add_anchor(3)
    chain.claim(2)
    chain.grow(2)
    chain.add_skip(7, 4)
    chain.rewind(3)
    chain.delta()
    chain.claim(3)
    chain.anchor(next_state(chain.state, 77))
    chain.grow(4)
    chain.add_skip(15, 11)
    chain.add_anchor(13)
    store.put(keys.mark_key(1), Mark(chain.run.id, 1, 3, 1, "0" * 32, 0).to_bytes())
    store.put(keys.pin_key("reader"), Pin(chain.run.id, "reader", 12, 3600).to_bytes())
    weights = {deltawire.state_digest(state).hex(): bits_of(state) for state in chain.states if state is not None}
    return {info.key: store.get(info.key, limit=1 << 30) for info in store.list("")}, weights


def _soup(seed: int) -> Soup:
    objects, _ = _template(seed)
    commits = [_json(objects[key]) for key in sorted(objects) if key.startswith(keys.COMMITS)]
    apart = (keys.COMMITS, keys.DATA, keys.RUN)
    others = {key: _json(data) for key, data in objects.items() if not key.startswith(apart)}
    return Soup(_json(objects[keys.RUN]), commits, others, {key: data for key, data in objects.items() if key.startswith(keys.DATA)})


def _store_of(soup: Soup, link: random.Random) -> MemoryStore:
    """Write the objects of a soup to a store. All hashes and most digests of references are right, unless the soup is `unlinked`."""
    store = MemoryStore()
    hashes: list[str] = []
    digests: list[Any] = []

    def refer(reference: Any) -> None:
        if isinstance(reference, dict) and isinstance(reference.get("seq"), int) and 0 <= reference["seq"] < len(hashes):
            reference["commit"] = hashes[reference["seq"]]
            if link.random() < 0.9:
                reference["digest"] = digests[reference["seq"]]

    for slot, commit in enumerate(soup.commits):
        if not soup.unlinked:
            commit["parent"] = hashes[-1] if hashes else None
            commit["links"] = [[m, hashes[m]] for m in link_targets(slot)]
            refer(commit.get("base"))
        data = _canonical(commit)
        hashes.append(blake3(data).hexdigest())
        digests.append(commit.get("digest"))
        store.put(keys.commit_key(slot), data)
    for key, record in soup.others.items():
        if key.startswith((keys.ANCHORS, keys.SKIPS)) and not soup.unlinked:
            refer(record.get("target"))
            refer(record.get("base"))
        store.put(key, _canonical(record))
    store.put(keys.RUN, _canonical(soup.run))
    for key, data in soup.data.items():
        store.put(key, data)
    return store


# Mutations

_NUMBERS = [0, 1, 2, 3, 5, 7, 12, 15, 16, 17, 64, 1000, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, -1]
_ODD: list[Any] = [None, "", "x" * 300, "ÿ\u2028", [], {}, [[]], True, 0.5, "f" * 32, "f" * 64]


def _number(chance: random.Random, near: Any = None) -> int:
    if isinstance(near, int) and chance.random() < 0.6:
        return near + chance.choice([-2, -1, 1, 2, 3])
    return chance.choice(_NUMBERS)


def _slot(soup: Soup, chance: random.Random) -> int:
    """Choose a slot, often the last one. Readers of the newest version need that commit, and can avoid most others."""
    return len(soup.commits) - 1 if chance.random() < 0.4 else chance.randrange(len(soup.commits))


def _change_commit(soup: Soup, chance: random.Random) -> str:
    """Change one field of a commit, but keep the field's form."""
    slot = _slot(soup, chance)
    commit = soup.commits[slot]
    name = chance.choice(
        ["kind", "kind", "epoch", "epoch", "seq", "state_seq", "updates", "digest", "digest", "state_bytes", "tensors", "changed"]
    )
    if name == "kind":
        commit[name] = chance.choice(["fence", "delta", "anchor", "rewind", "delta", "merge"])
        if chance.random() < 0.5:  # the other fields then fit that kind
            commit["files"] = commit["files"] if commit[name] in ("delta", "anchor") else []
            commit["base"] = None if commit[name] == "anchor" else {"seq": chance.randrange(max(1, slot)), "commit": "", "digest": None}
            commit["state_seq"] = slot
    elif name == "digest":
        commit[name] = chance.choice([None, "f" * 32, chance.choice(soup.commits)["digest"]])
    else:
        commit[name] = _number(chance, commit[name])
    return f"{name} of commit {slot}: {commit[name]!r}"


def _change_base(soup: Soup, chance: random.Random) -> str:
    """Change the base of a commit to any commit before it, to itself, or to nothing."""
    slot = _slot(soup, chance)
    soup.commits[slot]["base"] = base = chance.choice([None, {"seq": chance.randrange(slot + 2), "commit": "f" * 64, "digest": None}])
    return f"base of commit {slot}: {base}"


def _delta_without_files(soup: Soup, chance: random.Random) -> str:
    slot = max(1, _slot(soup, chance))
    soup.commits[slot] |= {"kind": "delta", "files": [], "changed": 0, "state_seq": slot}
    soup.commits[slot]["base"] = {"seq": chance.choice([slot - 1, chance.randrange(slot)]), "commit": "", "digest": None}
    if chance.random() < 0.5:
        soup.commits[slot]["digest"] = chance.choice(soup.commits)["digest"]
    return f"commit {slot} is a delta without files"


def _any_record(soup: Soup, chance: random.Random) -> tuple[str, Record]:
    kind = chance.randrange(4)
    if kind == 0:
        key = chance.choice(sorted(soup.others))
        return key, soup.others[key]
    if kind == 1 and chance.random() < 0.3:
        return keys.RUN, soup.run
    slot = _slot(soup, chance)
    return f"commit {slot}", soup.commits[slot]


def _inside(record: Any, chance: random.Random) -> tuple[Any, Any]:
    """Choose a container within a record, and one of its keys or indices."""
    while True:
        place = chance.choice(sorted(record)) if isinstance(record, dict) else chance.randrange(len(record))
        inner = record[place]
        if not (isinstance(inner, (dict, list)) and inner) or chance.random() < 0.2:
            return record, place
        record = inner


def _change_any_field(soup: Soup, chance: random.Random) -> str:
    """Change any field of any record to anything, or remove it, or add another."""
    name, record = _any_record(soup, chance)
    container, place = _inside(record, chance)
    way = chance.randrange(6)
    if way == 0:
        del container[place]
    elif way == 1 and isinstance(container, dict):
        container["more"] = chance.choice(_ODD)
    elif way == 2:
        container[place] = chance.choice(_ODD)
    elif isinstance(container[place], int) or way == 3:
        container[place] = _number(chance, container[place])
    elif isinstance(container[place], str) and container[place]:
        at = chance.randrange(len(container[place]))
        container[place] = container[place][:at] + chance.choice("0f/.-é\0") + container[place][at + 1 :]
    return f"{name}: {place} {['is gone', 'has company', 'is odd'][way] if way < 3 else 'is ' + repr(container[place])[:60]}"


def _change_shortcut(soup: Soup, chance: random.Random) -> str:
    """Change the target, base or claims of a shortcut. Keep its key, or move it to the key that fits its new content."""
    key = chance.choice([key for key in soup.others if key.startswith((keys.ANCHORS, keys.SKIPS))] or [None])
    if key is None:
        return "no shortcut to change"
    record = copy.deepcopy(soup.others[key])
    slots = len(soup.commits)
    for reference in ("target", "base"):
        if isinstance(record.get(reference), dict) and chance.random() < 0.6:
            record[reference]["seq"] = chance.randrange(slots + 2)
    if chance.random() < 0.4:
        record["files"] = copy.deepcopy(chance.choice(soup.commits)["files"])
    target = record["target"]["seq"] if isinstance(record.get("target"), dict) else 0
    base = record.get("base")
    if isinstance(target, int) and chance.random() < 0.7:
        about = soup.commits[target] if target < slots else soup.commits[-1]
        record |= {"state_bytes": about.get("state_bytes"), "tensors": about.get("tensors")}
        if 0 <= target < 10**20:
            key = keys.anchor_key(target) if base is None else keys.skip_key(target, base["seq"]) if isinstance(base, dict) else key
    soup.others[key] = record
    return f"{key} leads from {base and base.get('seq')} to {target}"


def _change_files(soup: Soup, chance: random.Random) -> str:
    """Change the files of a commit or shortcut: others, fewer, twice, in another order, with other sizes, or of another commit."""
    name, record = _any_record(soup, chance)
    files = record.get("files")
    if not isinstance(files, list) or not files or not all(isinstance(file, dict) for file in files):
        return f"{name} has no files to change"
    way = chance.randrange(8)
    file = chance.choice(files)
    if way == 0:
        files.remove(file)
    elif way == 1:
        files.append(copy.deepcopy(file))
    elif way == 2:
        chance.shuffle(files)
    elif way == 3:
        record["files"] = copy.deepcopy(chance.choice(soup.commits).get("files"))
    elif way == 4:
        other = copy.deepcopy(
            chance.choice([each for commit in soup.commits for each in commit.get("files") or [] if isinstance(each, dict)] or [file])
        )
        file |= {field: other.get(field) for field in ("key", "blake3", "size", *(["raw"] if chance.random() < 0.5 else []))}
    elif way == 5:
        file["name"] = chance.choice(
            [None, "../x", "a/b", ".hidden", "MODEL.safetensors", "deltawire.json", "x.tmp", "config.json", "é" * 200]
        )
    else:
        field = chance.choice(["size", "raw", "first", "count"])
        file[field] = _number(chance, file.get(field))
    return f"files of {name}, way {way}"


def _change_data(soup: Soup, chance: random.Random) -> str:
    """Change the content of a data object. Every record that names the object gets its new, right name."""
    old = chance.choice(sorted(soup.data))
    data, how = _other_content(soup.data[old], chance)
    digest = blake3(data).hexdigest()
    new = old.replace(old.split("/")[-1].split(".")[0], digest)
    soup.data[new] = data
    for record in [*soup.commits, *soup.others.values()]:
        for file in record.get("files") or []:
            if isinstance(file, dict) and file.get("key") == old:
                file |= {"key": new, "blake3": digest, "size": len(data)}
    return f"content of {old[-90:-60]}…: {how}"


def _other_content(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    way = chance.randrange(6)
    if way == 0:
        at = chance.randrange(len(data) + 1)
        return data[:at], f"cut at {at}"
    if way == 1:
        return data + bytes(chance.randrange(1, 40)), "longer"
    with contextlib.suppress(Exception):  # data that are not a delta are changed in another way
        metadata, changes, payloads = split_delta(data)
        if way == 2:
            metadata[chance.choice(["before", "after"])] = "f" * 32
        elif way == 3 and payloads:
            name = chance.choice(sorted(payloads))
            at = chance.randrange(len(payloads[name]))
            payloads[name] = payloads[name][:at] + bytes([chance.randrange(256)]) + payloads[name][at + 1 :]
        elif way == 4 and payloads:
            payloads["z.other"] = payloads.pop(chance.choice(sorted(payloads)))
        if "before" in metadata:
            return join_delta(metadata, changes, payloads), f"another delta, way {way}"
    flipped = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        flipped[chance.randrange(min(len(flipped), chance.choice([8, 200, 10**9])))] ^= 1 << chance.randrange(8)
    return bytes(flipped), "bits flipped"


def _lose_data(soup: Soup, chance: random.Random) -> str:
    key = chance.choice(sorted(soup.data))
    del soup.data[key]
    return f"{key[-90:-60]}… is missing"


def _change_order(soup: Soup, chance: random.Random) -> str:
    """Remove commits at the end, repeat or swap some, or give one to an earlier writer. Renumber them or not."""
    way = chance.randrange(4)
    slot = chance.randrange(1, len(soup.commits))
    if way == 0:
        del soup.commits[slot + 1 :]
    elif way == 1:
        soup.commits.insert(slot, copy.deepcopy(chance.choice(soup.commits)))
    elif way == 2:
        other = chance.randrange(1, len(soup.commits))
        soup.commits[slot], soup.commits[other] = soup.commits[other], soup.commits[slot]
    else:
        late = copy.deepcopy(soup.commits[slot])
        late["epoch"] = chance.choice([0, 1, 2, 4])
        soup.commits.insert(slot, late)
    if chance.random() < 0.9:
        for number, commit in enumerate(soup.commits):
            if commit.get("state_seq") == commit.get("seq"):
                commit["state_seq"] = number
            commit["seq"] = number
    return f"order of commits, way {way} at {slot}"


def _change_epochs(soup: Soup, chance: random.Random) -> str:
    """Change epochs: one resumes from any version, is missing, or is claimed although no writer used it."""
    number = chance.choice([1, 2, 3, 3, 3, 4, 5])
    key = keys.epoch_key(number)
    way = chance.randrange(3)
    if way == 0:
        soup.others.pop(key, None)
    else:
        template = next((copy.deepcopy(record) for each, record in soup.others.items() if each.startswith(keys.EPOCHS)), None)
        if template is None:
            return "no epoch to change"
        record = soup.others.setdefault(key, template | {"epoch": number})
        begins = next((slot for slot, commit in enumerate(soup.commits) if commit.get("epoch") == number), 0)
        record["resumed_from"] = chance.choice([None, begins, begins + 1, chance.randrange(len(soup.commits) + 2), _number(chance)])
        if way == 2:
            soup.others[keys.epoch_key(chance.randrange(10**9))] = copy.deepcopy(record)
    return f"{key}, way {way}: {soup.others.get(key, {}).get('resumed_from', 'gone')}"


def _change_marks_and_pins(soup: Soup, chance: random.Random) -> str:
    way = chance.randrange(4)
    mark = next((copy.deepcopy(record) for key, record in soup.others.items() if key.startswith(keys.MARKS)), None)
    if way == 0 and mark is not None:
        number = chance.choice([0, 2, 3, 10**9])
        soup.others[keys.mark_key(number)] = mark | {"mark": number, "floor": chance.choice([0, 5, 13, 15, 10**6, 2**62])}
    elif way == 1:
        pin = soup.others.get(keys.pin_key("reader"))
        if pin is not None:
            pin |= {"seq": _number(chance, pin.get("seq")), "ttl": chance.choice([0, 1, 10**9, 10**15, 2**63 - 1])}
    elif way == 2 and keys.HEAD in soup.others:
        soup.others[keys.HEAD]["seq"] = _number(chance, soup.others[keys.HEAD].get("seq"))
    else:
        limits = soup.run.get("limits")
        if isinstance(limits, dict) and limits:
            limits[chance.choice(sorted(limits))] = chance.choice([0, 1, 3, 4, 100, 1500, 2**40, 2**63 - 1])
    return f"marks, pins, HEAD and limits, way {way}"


def _unlink(soup: Soup, chance: random.Random) -> str:
    soup.unlinked = True
    return "hashes are not made right"


MUTATIONS: list[tuple[Callable[[Soup, random.Random], str], int]] = [
    (_change_commit, 6),
    (_change_base, 3),
    (_delta_without_files, 2),
    (_change_any_field, 5),
    (_change_shortcut, 4),
    (_change_files, 4),
    (_change_data, 4),
    (_lose_data, 2),
    (_change_order, 3),
    (_change_epochs, 3),
    (_change_marks_and_pins, 3),
    (_unlink, 1),
]


def hostile(seed: int) -> tuple[MemoryStore, list[str]]:
    """Return the chain of a seed, and what was changed. Seed 0 is the sound chain."""
    chance = random.Random(seed)
    soup = copy.deepcopy(_soup(seed))
    mutations, weights = zip(*MUTATIONS, strict=True)
    for _ in range(0 if seed == 0 else chance.choice([1, 1, 1, 2, 2, 3])):
        for mutate in chance.choices(mutations, weights):
            # an earlier change removed what this one would change
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                soup.done.append(mutate(soup, chance))
    return _store_of(soup, chance), soup.done


# Readers


class WrongWeights(AssertionError):
    """A reader got weights that are not those of the version."""


def _check(state: Any, digest: Any, expected: Any = None) -> None:
    found = bits_of(state)
    if digest is not None and deltawire.state_digest(state) != digest:
        raise WrongWeights(f"the weights do not have the digest {digest.hex()} of their version")
    text = digest.hex() if digest is not None else ""
    known = expected if expected is not None else (_handmade()[1] | _published()[1]).get(text)
    if known is not None and found != known:
        raise WrongWeights("other weights than those that were published, of the same digest")


def _seqs(store: Store) -> list[int]:
    return list(range(sum(1 for _ in store.list(keys.COMMITS)) + 2))


def read_log(store: Store, folder: Path) -> None:
    log = ChainLog(store)
    head = log.head()
    if head is not None:
        log.in_force(head)
    for seq in _seqs(store):
        with contextlib.suppress(DeltawireError):
            log.version(seq)
    log.floor()
    list(log.tail(-1))


def read_routes(store: Store, folder: Path) -> None:
    log = ChainLog(store)
    head = log.head()
    for seq in _seqs(store):
        with contextlib.suppress(DeltawireError):
            commit = log.read(seq)
            if commit is not None and head is not None:
                Routes(log).find(None, commit)
                Routes(log).find(log.ref(commit), head)


def read_command_log(store: Store, folder: Path) -> None:
    for count in (None, 3):
        for by_commits in (False, True):
            with contextlib.suppress(DeltawireError):
                read_history(ChainLog(store), count, by_commits=by_commits)
    log = ChainLog(store)
    for number in (1, 2, 5, 9):
        for find in (find_version, find_step):
            with contextlib.suppress(DeltawireError):
                assert find(log, number).kind != "fence"


def read_fleet_versions(store: Store, folder: Path) -> None:
    versions = ChainVersions(ChainLog(store))
    for seq in _seqs(store):
        with contextlib.suppress(DeltawireError):
            versions.find(seq)
    versions.newest()


def _sync(subscriber: Subscriber, target: int | None = None) -> None:
    version = subscriber.sync(target)
    _check(subscriber.state, version.digest)


def sync_memory(store: Store, folder: Path) -> None:
    with Subscriber(store, options=ReaderOptions(patience=0.0, reader="memory")) as subscriber:
        for seq in _seqs(store)[::3]:
            with contextlib.suppress(DeltawireError):
                _sync(subscriber, seq)
        for _ in range(2):
            with contextlib.suppress(DeltawireError):
                _sync(subscriber)
        if subscriber.version is not None:  # the reader's version is whole, whatever failed
            _check(subscriber.state, subscriber.version.digest)


def sync_mirror(store: Store, folder: Path) -> None:
    """Sync a mirror twice to the newest version, first from a late version and then from an early one.

    The second sync finds what the first one left.
    """
    for targets in ((_seqs(store)[-4], None, None), (3, None, None)):
        with Subscriber(store, folder / "mirror", options=ReaderOptions(patience=0.0, reader="mirror")) as subscriber:
            for target in targets:
                with contextlib.suppress(DeltawireError):
                    _sync(subscriber, target)
            if subscriber.version is not None:
                _check(subscriber.state, subscriber.version.digest)


def pull_newest(store: Store, folder: Path) -> None:
    version = pull(store, folder / "pulled", options=ReaderOptions(patience=0.0, pin=False))
    _check(Checkpoint(folder / "pulled"), version.digest)


def verify_all(store: Store, folder: Path) -> None:
    verify(store, deep=True)


def collect_garbage(store: Store, folder: Path) -> None:
    """Collect in a dry run, then announce, then delete. A sync after that ends with the right weights or with an error."""
    with contextlib.suppress(DeltawireError):
        collect(store, grace=0.0, dry_run=True)
    with contextlib.suppress(DeltawireError):
        for _ in range(2):
            collect(store, grace=0.0, now=datetime(2100, 1, 1, tzinfo=timezone.utc))
    with Subscriber(store, options=ReaderOptions(patience=0.0, pin=False)) as subscriber:
        _sync(subscriber)


def _publish(store: Store, resume_from: int | None = None) -> None:
    with Publisher(store, options=WriterOptions(segment_bytes=500), resume_from=resume_from) as publisher:
        for number in range(2):
            state = next_state(first_state(), 1000 + number)
            published = publisher.publish(state, step=1000 + number)
            assert published is not None
    with Subscriber(store, options=ReaderOptions(patience=0.0, pin=False)) as subscriber:
        version = subscriber.sync()
        if version.seq == published.seq:
            _check(subscriber.state, version.digest, bits_of(state))
        _check(subscriber.state, version.digest)


def resume(store: Store, folder: Path) -> None:
    _publish(store)


def resume_an_older_one(store: Store, folder: Path) -> None:
    _publish(store, resume_from=4)


READERS: list[Callable[[Store, Path], None]] = [
    read_log,
    read_routes,
    read_command_log,
    read_fleet_versions,
    sync_memory,
    sync_mirror,
    pull_newest,
    verify_all,
    collect_garbage,
    resume,
    resume_an_older_one,
]


@dataclass(frozen=True)
class Finding:
    seed: int
    reader: str
    changes: list[str]
    trace: str

    def __str__(self) -> str:
        changes = "\n".join(f"    {each}" for each in self.changes)
        return f"seed {self.seed}, {self.reader}:\n{changes}\n{self.trace}"


def _copy_of(store: MemoryStore) -> MemoryStore:
    copied = MemoryStore()
    for info in store.list(""):
        copied.put(info.key, store.get(info.key, limit=1 << 30))
    return copied


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the address space grow by `MEMORY` only, so that allocations of sizes from hostile records fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_seed(seed: int, folder: Path, outcomes: dict[str, int] | None = None) -> list[Finding]:
    """Run every reader on the chain of a seed. Each gets its own copy."""
    store, changes = hostile(seed)
    findings = []
    for reader in READERS:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            try:
                with bounded_memory():
                    reader(CountingStore(_copy_of(store)), Path(own))
                outcome = "succeeded"
            except DeltawireError as error:
                outcome = type(error).__name__
            except (Exception, TooManyCalls):
                outcome = "finding"
                findings.append(Finding(seed, reader.__name__, changes, traceback.format_exc()))
            if outcomes is not None:
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, help="the first seed (0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--most", type=int, default=10, help="end after so many findings")
    chosen = parser.parse_args()
    first, outcomes, findings = chosen.first or 0, dict[str, int](), list[Finding]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + chosen.seeds):
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            if chosen.seeds == 1:
                print("\n".join(hostile(seed)[1]))
            for finding in try_seed(seed, Path(folder), outcomes):
                print(finding, flush=True)
                findings.append(finding)
            if len(findings) >= chosen.most:
                break
        faulthandler.cancel_dump_traceback_later()
    print(f"{seed + 1 - first} chains, {len(findings)} findings; " + ", ".join(f"{name} {outcomes[name]}" for name in sorted(outcomes)))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
