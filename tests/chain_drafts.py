"""Small sound chains as JSON, and stores that hold them with right hashes after a change."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from blake3 import blake3
from support import bits_of, publish_fully
from toy_chain import ToyChain, first_state, next_state

import deltawire
from deltawire.chain.log import ChainLog
from deltawire.format.records.collection_records import Mark, Pin
from deltawire.format.records.record_parts import link_targets
from deltawire.publish import AnchorPolicy, Publisher
from deltawire.publish.channels import ChannelWriter
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import keys
from deltawire.store.memory import MemoryStore

Record = dict[str, Any]


@dataclass
class ChainDraft:
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


def parse(data: bytes) -> Record:
    record: Record = json.loads(data)
    return record


def _canonical(record: Record) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


Template = tuple[dict[str, bytes], dict[str, Any]]
"""The objects of a sound chain, and the weights of each digest."""


def _template(seed: int) -> Template:
    """Return the chain to change: for every fourth seed one that a publisher wrote, for the others one that was written by hand.

    Every eighth chain has file lists.
    """
    return published_chain() if seed % 4 == 3 else handmade_chain(listed=has_lists(seed), has_channels=has_channels(seed))


def has_lists(seed: int) -> bool:
    """Return whether the chain of a seed has file lists."""
    return seed % 8 == 6


def has_channels(seed: int) -> bool:
    """Return whether the chain of a seed has channels."""
    return seed % 16 == 10


@cache
def published_chain() -> Template:
    """Publish a chain with three publishers. The second takes over with other attachments, and the third resumes from an older version."""
    store = MemoryStore()
    states = [first_state()]
    for number in range(14):
        states.append(next_state(states[-1], number))
    options = WriterOptions(segment_bytes=500, anchor_policy=AnchorPolicy(4, 6))
    with Publisher(store, attachments={"config.json": b"{}", "chat_template.jinja": b"a"}, options=options) as publisher:
        versions: list[Any] = [publish_fully(publisher, state, step=step) for step, state in enumerate(states[:8])]
    with Publisher(store, attachments={"config.json": b"{}", "chat_template.jinja": b"b"}, options=options) as publisher:
        versions += [publish_fully(publisher, state, step=8 + step) for step, state in enumerate(states[8:11])]
    with Publisher(store, resume_from_seq=versions[-2].seq, options=options) as publisher:
        versions += [publish_fully(publisher, state, step=10 + step) for step, state in enumerate(states[11:])]
    store.put(keys.pin_key("reader"), Pin(ChainLog(store).run.id, "reader", 8, 3600).to_bytes())
    weights = {deltawire.state_digest(state).hex(): bits_of(state) for state in states}
    return {info.key: store.get(info.key, limit=1 << 30) for info in store.list("")}, weights


@cache
def handmade_chain(*, listed: bool = False, has_channels: bool = False) -> Template:
    """Write a chain with all kinds of commits and objects. With `listed`, its last records have file lists."""
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
    chain.grow(2)
    chain.listed = listed
    chain.grow(2)
    chain.add_skip(15, 11)
    chain.add_anchor(13)
    if has_channels:
        stable, canary = (ChannelWriter(ChainLog(store), name) for name in ("stable", "canary"))
        for seq in (2, 6, 15):
            stable.promote(chain.commits[seq])
        stable.rollback()
        canary.promote(chain.commits[14], share=1000)
    store.put(keys.mark_key(1), Mark(chain.run.id, 1, 3, 1, "0" * 32, 0).to_bytes())
    store.put(keys.pin_key("reader"), Pin(chain.run.id, "reader", 12, 3600).to_bytes())
    weights = {deltawire.state_digest(state).hex(): bits_of(state) for state in chain.states if state is not None}
    return {info.key: store.get(info.key, limit=1 << 30) for info in store.list("")}, weights


def draft_of(seed: int) -> ChainDraft:
    objects, _ = _template(seed)
    commits = [parse(objects[key]) for key in sorted(objects) if key.startswith(keys.COMMITS)]
    apart = (keys.COMMITS, keys.DATA, keys.RUN)
    others = {key: parse(data) for key, data in objects.items() if not key.startswith(apart)}
    return ChainDraft(parse(objects[keys.RUN]), commits, others, {key: data for key, data in objects.items() if key.startswith(keys.DATA)})


def linked_store(draft: ChainDraft, link: random.Random) -> MemoryStore:
    """Write the objects of a draft to a store. All hashes and most digests of references are right, unless the draft is `unlinked`."""
    store = MemoryStore()
    hashes: list[str] = []
    digests: list[Any] = []

    def refer(reference: Any) -> None:
        if isinstance(reference, dict) and isinstance(reference.get("seq"), int) and 0 <= reference["seq"] < len(hashes):
            reference["commit"] = hashes[reference["seq"]]
            if link.random() < 0.9:
                reference["digest"] = digests[reference["seq"]]

    for seq, commit in enumerate(draft.commits):
        if not draft.unlinked:
            commit["parent"] = hashes[-1] if hashes else None
            commit["links"] = [[m, hashes[m]] for m in link_targets(seq)]
            refer(commit.get("base"))
        data = _canonical(commit)
        hashes.append(blake3(data).hexdigest())
        digests.append(commit.get("digest"))
        store.put(keys.commit_key(seq), data)
    for key, record in draft.others.items():
        if key.startswith((keys.ANCHORS, keys.SKIPS)) and not draft.unlinked:
            refer(record.get("target"))
            refer(record.get("base"))
        channel = keys.parse_channel_key(key)
        if channel is not None and not draft.unlinked:
            refer(record.get("target"))
            earlier = draft.others.get(keys.channel_key(channel[0], channel[1] - 1)) if channel[1] else None
            record["before"] = None if earlier is None else blake3(_canonical(earlier)).hexdigest()
        store.put(key, _canonical(record))
    store.put(keys.RUN, _canonical(draft.run))
    for key, data in draft.data.items():
        store.put(key, data)
    return store
