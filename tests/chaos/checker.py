"""Check a chain after chaos from its objects alone, by docs/protocol.md, without any reading code of deltawire.

The checker uses only the codec (`apply_delta`), and compares its results with weights that can be recomputed from the number of a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3
from safetensors.numpy import load
from small_model import bits, state_of

import deltawire

Record = dict[str, Any]
Seen = tuple[int, int]
"""A version as a process knows it: its sequence number, and its step."""


@dataclass
class Verdict:
    violations: list[str] = field(default_factory=list)
    commits: int = 0
    void: int = 0
    rebuilt: int = 0
    """The number of commits and shortcuts whose data exist and lead to the right weights."""
    acknowledged: int = 0
    reads: int = 0

    def blame(self, what: str) -> None:
        self.violations.append(what)


def check(
    objects: Mapping[str, bytes], acknowledged: Mapping[str, list[Seen]], reads: Mapping[str, list[Seen]], *, key: str | None = None
) -> Verdict:
    """Compare a chain with what publishers acknowledged and what readers saw, both by the name of the process. `key` signed all records."""
    verdict = Verdict()
    commits = _commits(objects, verdict, key)
    for who, versions in acknowledged.items():
        _check_history("acknowledged", who, versions, commits, verdict)
        verdict.acknowledged += len(versions)
    for who, versions in reads.items():
        _check_history("was given", who, versions, commits, verdict)
        verdict.reads += len(versions)
    _check_data(objects, commits, verdict, key)
    return verdict


def _record(objects: Mapping[str, bytes], key: str, verdict: Verdict) -> Record | None:
    data = objects.get(key)
    if data is None:
        return None
    record: Record = json.loads(data)
    if data != json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode():
        verdict.blame(f"{key} is not in canonical form")
    return record


def _commits(objects: Mapping[str, bytes], verdict: Verdict, key: str | None) -> list[Record]:
    """Return all commits. Each has `_hash`, and `_void` if a commit before it has a higher epoch."""
    commits: list[Record] = []
    epoch = 0
    while (commit := _record(objects, f"commit/{len(commits):020}.json", verdict)) is not None:
        seq = len(commits)
        commit["_hash"] = blake3(objects[f"commit/{seq:020}.json"]).hexdigest()
        links = [[seq - (1 << k), commits[seq - (1 << k)]["_hash"]] for k in range(1, 63) if seq and seq % (1 << k) == 0]
        if commit["seq"] != seq or commit["parent"] != (commits[-1]["_hash"] if commits else None) or commit["links"] != links:
            verdict.blame(f"commit {seq} does not fit its place in the chain")
        _check_signed(f"commit {seq}", commit, key, verdict)
        commit["_void"] = commit["epoch"] < epoch
        epoch = max(epoch, commit["epoch"])
        commits.append(commit)
    if len(commits) != sum(name.startswith("commit/") for name in objects):
        verdict.blame(f"there is a gap after commit {len(commits) - 1}")
    verdict.commits, verdict.void = len(commits), sum(commit["_void"] for commit in commits)
    return commits


def _check_signed(what: str, record: Record, key: str | None, verdict: Verdict) -> None:
    by = record["signature"] and record["signature"]["key"]
    if by != key:
        verdict.blame(f"{what} is signed by {by}, not by {key}")


def _check_history(verb: str, who: str, versions: list[Seen], commits: list[Record], verdict: Verdict) -> None:
    """Check that the chain has all versions that a process recorded, with the same steps and in the same order."""
    before = -1
    for seq, step in versions:
        if seq >= len(commits) or commits[seq]["_void"] or commits[seq]["kind"] == "fence":
            verdict.blame(f"{who} {verb} version {seq}, which the chain does not have")
        elif commits[seq]["step"] != step:
            verdict.blame(f"{who} {verb} version {seq} as step {step}, but in the chain it is step {commits[seq]['step']}")
        if seq <= before:
            verdict.blame(f"{who} {verb} version {seq} after {before}")
        before = seq


def _check_data(objects: Mapping[str, bytes], commits: list[Record], verdict: Verdict, key: str | None) -> None:
    """Check that every commit and shortcut above the floor leads to the right weights, and that a route leads to the newest version."""
    marks = [_record(objects, name, verdict) or {} for name in objects if name.startswith("gc/")]
    floor = max([mark["floor"] for mark in marks], default=-1)
    anchors = _check_shortcuts(objects, commits, verdict, key)
    before: Record | None = None
    for commit in commits:
        if commit["_void"]:
            continue
        seq, base = commit["seq"], commit["base"]
        if base is not None and commits[base["seq"]]["_hash"] != base["commit"]:
            verdict.blame(f"commit {seq} has a base that the chain does not have")
        elif commit["kind"] in ("fence", "rewind"):
            if base is not None and commits[base["seq"]]["digest"] != commit["digest"]:
                verdict.blame(f"commit {seq} does not leave its base's state in force")
        else:
            if commit["kind"] == "delta" and (before is None or base["seq"] != before["seq"]):
                verdict.blame(f"commit {seq} is not based on the one before it")
            version = None if base is None else _version_of(commits, base["seq"])
            _check_files(objects, f"commit {seq}", commit["files"], version, commit, verdict, must=seq > floor)
        before = commit
    if before is not None and before["digest"] is not None and not _leads_back(commits, before, anchors, objects):
        verdict.blame("nothing leads to the newest version")


def _check_shortcuts(objects: Mapping[str, bytes], commits: list[Record], verdict: Verdict, key: str | None) -> set[int]:
    """Check that shortcuts whose data exist lead to the right weights. Return the versions that have a full checkpoint."""
    anchors = set()
    for name in sorted(objects):
        if not name.startswith(("anchor/", "skip/")):
            continue
        shortcut = _record(objects, name, verdict)
        assert shortcut is not None
        _check_signed(name, shortcut, key, verdict)
        if any(
            ref["seq"] >= len(commits) or commits[ref["seq"]]["_hash"] != ref["commit"]
            for ref in (shortcut["target"], shortcut["base"])
            if ref
        ):
            verdict.blame(f"{name} is about a commit that the chain does not have")
            continue
        target = commits[shortcut["target"]["seq"]]
        base = None if shortcut["base"] is None else _version_of(commits, shortcut["base"]["seq"])
        if _check_files(objects, name, shortcut["files"], base, target, verdict, must=False) and base is None:
            anchors.add(target["seq"])
    return anchors


def _leads_back(commits: list[Record], head: Record, anchors: set[int], objects: Mapping[str, bytes]) -> bool:
    """Return whether a reader with nothing reaches the head, by an existing checkpoint and the data of all versions after it."""
    commit = head
    while True:
        if commit["seq"] in anchors:
            return True
        if commit["kind"] in ("delta", "anchor") and not all(file["key"] in objects for file in commit["files"]):
            return False
        if commit["kind"] == "anchor":
            return True
        if commit["base"] is None:
            return False
        commit = commits[commit["base"]["seq"]]


def _version_of(commits: list[Record], seq: int) -> Record:
    """Return the version that is current after a commit."""
    commit = commits[seq]
    while commit["kind"] == "fence" and commit["base"] is not None:
        commit = commits[commit["base"]["seq"]]
    return commit


def _check_files(
    objects: Mapping[str, bytes], what: str, files: list[Record], base: Record | None, target: Record, verdict: Verdict, *, must: bool
) -> bool:
    """Return whether the files exist, and lead from the weights of the base, or from nothing, to those of the target's step."""
    contents = {file["key"]: objects.get(file["key"]) for file in files}
    if None in contents.values():
        if must:
            verdict.blame(f"data of {what} are missing")
        return False
    for file in files:
        data = contents[file["key"]] or b""
        if len(data) != file["size"] or blake3(data).hexdigest() != file["blake3"] or file["blake3"] not in file["key"]:
            verdict.blame(f"{file['key']} of {what} is damaged")
            return False
    state: dict[str, Any] = {} if base is None else state_of(base["step"])
    names = sorted(state)
    try:
        for file in files:
            data = contents[file["key"]] or b""
            if file["name"] is None:
                deltawire.apply_delta({name: state[name] for name in names[file["first"] : file["first"] + file["count"]]}, data)
            elif file["name"].endswith(".safetensors"):
                state |= load(data)
    except deltawire.DeltawireError as error:
        verdict.blame(f"{what} cannot be applied to its base: {error}")
        return False
    if bits(state) != bits(state_of(target["step"])):
        verdict.blame(f"{what} does not lead to the weights of step {target['step']}")
        return False
    verdict.rebuilt += 1
    return True
