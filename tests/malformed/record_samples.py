"""Sound records of every kind, and how a test spells and refuses a changed one."""

from __future__ import annotations

import dataclasses
import json

import pytest

from deltawire import Digest
from deltawire.errors import CorruptRecord
from deltawire.format.records.announcement_records import Announcement
from deltawire.format.records.canary_records import CanaryRecord, RecordedTokens
from deltawire.format.records.channel_records import ChannelMove
from deltawire.format.records.collection_records import Mark, Pin
from deltawire.format.records.file_list import FileListRef
from deltawire.format.records.gate_records import ChannelPosition, EvaluationResult, GateRecord, GroupMean, LimitFinding
from deltawire.format.records.record_parts import CommitRef, FileEntry, Limits, RecipeRecord, Signature, link_targets
from deltawire.format.records.run_records import Epoch, Head, Run
from deltawire.format.records.version_records import Commit, Shortcut

ID, HASH, OTHER = "0123456789abcdef" * 2, "ab" * 32, "cd" * 32
DIGEST = Digest((1, 2, 3, 4))


def data_file(name=None, first=None, count=None, raw=100, hash_=HASH, suffix="safetensors"):
    return FileEntry(f"data/0000000003/00000000000000000008/{hash_}.{suffix}", 50, raw, hash_, name, first, count)


def segment(first, count, raw=50):
    return data_file(None, first, count, raw)


CHECKPOINT = (data_file("model.safetensors"), data_file("config.json", raw=0, hash_=OTHER, suffix="file"))
SIGNATURE = Signature(HASH, "ef" * 64)
DELTA = Commit(
    id=ID,
    seq=8,
    epoch=3,
    nonce=ID,
    kind="delta",
    parent=HASH,
    links=tuple((m, HASH) for m in link_targets(8)),
    base=CommitRef(7, OTHER, Digest()),
    state_seq=8,
    updates=5,
    digest=DIGEST,
    state_bytes=100,
    tensors=4,
    changed=3,
    step=None,
    time=1,
    files=(segment(0, 1), segment(2, 2)),
    meta={"note": "größer"},
    signature=SIGNATURE,
)
ANCHOR = dataclasses.replace(DELTA, kind="anchor", base=None, files=CHECKPOINT, changed=0, step=12, signature=None)
FENCE = dataclasses.replace(DELTA, kind="fence", base=CommitRef(7, OTHER, DIGEST), state_seq=6, files=(), changed=0)
REWIND = dataclasses.replace(FENCE, kind="rewind", state_seq=8, base=CommitRef(2, OTHER, DIGEST))
FIRST = Commit(ID, 0, 1, ID, "fence", None, (), None, None, 0, None, 0, 0, 0, None, 1, ())
ATTACHED = tuple(data_file(name, raw=0, hash_=OTHER, suffix="file") for name in ("config.json", "tokenizer.json"))
DELTA_2 = dataclasses.replace(DELTA, run="my run", attachments=ATTACHED)
ANCHOR_2 = dataclasses.replace(ANCHOR, run="my run", files=CHECKPOINT[:1], attachments=ATTACHED)
FENCE_2 = dataclasses.replace(FENCE, run="my run", attachments=())
RECIPE = RecipeRecord("fp8-block", 1, {"scale": "fp32", "sticky": True, "ignore": ["re:.*lm_head$"], "group_size": 32})
DELTA_3 = dataclasses.replace(DELTA_2, recipe=RECIPE)
LISTED = FileListRef(f"data/0000000003/00000000000000000008/{HASH}.file", 300, 2, 100)
LISTED_DELTA = dataclasses.replace(DELTA_2, files=(), file_list=LISTED)
LISTED_ANCHOR = dataclasses.replace(ANCHOR_2, files=(), file_list=LISTED)
SKIP = Shortcut(ID, 3, ID, 1, CommitRef(8, HASH, DIGEST), CommitRef(4, OTHER, Digest()), 100, 4, DELTA.files, SIGNATURE)
ANCHOR_SHORTCUT = dataclasses.replace(SKIP, base=None, files=CHECKPOINT, signature=None)
LISTED_SKIP = dataclasses.replace(SKIP, files=(), file_list=LISTED)
GATE = GateRecord(
    id=ID,
    number=3,
    canary=ChannelPosition("canary", 4, CommitRef(8, HASH, DIGEST)),
    stable=ChannelPosition("stable", 2, CommitRef(7, OTHER, DIGEST)),
    outcome="promote",
    why="solved:-0 holds",
    alpha=0.05,
    answers=700,
    age=60_000,
    evaluation=EvaluationResult(True, 1, "it exited with 0", {"accuracy": 0.75, "safety": 1.0}),
    limits=(LimitFinding("solved:-0", True, GroupMean(700, 0.75), GroupMean(710, 0.5), 470, 0.125, 0.375, "holds"),),
    time=1_700_000_000_000,
    nonce=ID,
    signature=SIGNATURE,
)
MOVE = ChannelMove(ID, "stable", 3, "rollback", CommitRef(8, HASH, DIGEST), OTHER, 50_000, "worse", "me@host", 5, ID, SIGNATURE)
CANARY = CanaryRecord(
    ID, ID, 1, CommitRef(8, HASH, DIGEST), (RecordedTokens((1, 2, 3), (4, 5), (-0.5, -1.25)), RecordedTokens((9,), (8,), (0.0,))), SIGNATURE
)
ANNOUNCEMENT = Announcement(ID, 3, 5, 8, CommitRef(7, OTHER, Digest()), DELTA.files, SIGNATURE)

RECORDS = {
    "run": Run("my run", ID, 1, Limits(1, 2, 3)),
    "epoch": Epoch(ID, 3, ID, 1, None),
    "resumed epoch": Epoch(ID, 3, ID, 1, 77, SIGNATURE),
    "epoch of version 1": Epoch(ID, 3, ID, 1, 77, version=1),
    "delta": DELTA,
    "delta with attachments": DELTA_2,
    "anchor with attachments": ANCHOR_2,
    "quantised delta": DELTA_3,
    "quantised anchor": dataclasses.replace(ANCHOR_2, recipe=RecipeRecord("of-the-future", 77)),
    "fence of version 2": FENCE_2,
    "delta with a file list": LISTED_DELTA,
    "anchor with a file list": LISTED_ANCHOR,
    "quantised delta with a file list": dataclasses.replace(LISTED_DELTA, recipe=RECIPE),
    "skip with a file list": LISTED_SKIP,
    "anchor": ANCHOR,
    "fence": FENCE,
    "first fence": FIRST,
    "rewind": REWIND,
    "skip": SKIP,
    "anchor shortcut": ANCHOR_SHORTCUT,
    "mark": Mark(ID, 2, 3, 40, ID, 1),
    "pin": Pin(ID, "host-1.reader_2", 9, 60),
    "head": Head(2**63 - 1),
    "canary": CANARY,
    "gate": GATE,
    "move of a channel": MOVE,
    "first move of a channel": dataclasses.replace(MOVE, move=0, kind="promote", before=None, share=None, signature=None),
    "announcement": ANNOUNCEMENT,
    "announcement without files": dataclasses.replace(ANNOUNCEMENT, files=(), signature=None),
}


def spelled(document):
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def refused(record, document):
    with pytest.raises(CorruptRecord):
        type(record).parse(document if isinstance(document, bytes) else spelled(document))
