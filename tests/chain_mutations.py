"""Changes to a chain that everybody who may write to the store can make. A seed chooses some of them."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable
from typing import Any

from blake3 import blake3
from chain_drafts import ChainDraft, Record, draft_of, has_lists, linked_store, parse
from support import join_delta, split_delta

from deltawire.store import keys
from deltawire.store.memory import MemoryStore

_NUMBERS = [0, 1, 2, 3, 5, 7, 12, 15, 16, 17, 64, 1000, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, -1]
_ODD: list[Any] = [None, "", "x" * 300, "ÿ\u2028", [], {}, [[]], True, 0.5, "f" * 32, "f" * 64]


def _number(chance: random.Random, near: Any = None) -> int:
    if isinstance(near, int) and chance.random() < 0.6:
        return near + chance.choice([-2, -1, 1, 2, 3])
    return chance.choice(_NUMBERS)


def _seq(draft: ChainDraft, chance: random.Random) -> int:
    """Choose a seq, often the last one. Readers of the newest version need that commit, and can avoid most others."""
    return len(draft.commits) - 1 if chance.random() < 0.4 else chance.randrange(len(draft.commits))


def _change_commit(draft: ChainDraft, chance: random.Random) -> str:
    """Change one field of a commit, but keep the field's form."""
    seq = _seq(draft, chance)
    commit = draft.commits[seq]
    name = chance.choice(
        ["kind", "kind", "epoch", "epoch", "seq", "state_seq", "updates", "digest", "digest", "state_bytes", "tensors", "changed"]
    )
    if name == "kind":
        commit[name] = chance.choice(["fence", "delta", "anchor", "rewind", "delta", "merge"])
        if chance.random() < 0.5:  # the other fields then fit that kind
            commit["files"] = commit["files"] if commit[name] in ("delta", "anchor") else []
            commit["base"] = None if commit[name] == "anchor" else {"seq": chance.randrange(max(1, seq)), "commit": "", "digest": None}
            commit["state_seq"] = seq
    elif name == "digest":
        commit[name] = chance.choice([None, "f" * 32, chance.choice(draft.commits)["digest"]])
    else:
        commit[name] = _number(chance, commit[name])
    return f"{name} of commit {seq}: {commit[name]!r}"


def _change_base(draft: ChainDraft, chance: random.Random) -> str:
    """Change the base of a commit to any commit before it, to itself, or to nothing."""
    seq = _seq(draft, chance)
    draft.commits[seq]["base"] = base = chance.choice([None, {"seq": chance.randrange(seq + 2), "commit": "f" * 64, "digest": None}])
    return f"base of commit {seq}: {base}"


def _delta_without_files(draft: ChainDraft, chance: random.Random) -> str:
    seq = max(1, _seq(draft, chance))
    draft.commits[seq] |= {"kind": "delta", "files": [], "changed": 0, "state_seq": seq}
    draft.commits[seq]["base"] = {"seq": chance.choice([seq - 1, chance.randrange(seq)]), "commit": "", "digest": None}
    if chance.random() < 0.5:
        draft.commits[seq]["digest"] = chance.choice(draft.commits)["digest"]
    return f"commit {seq} is a delta without files"


def _any_record(draft: ChainDraft, chance: random.Random) -> tuple[str, Record]:
    kind = chance.randrange(4)
    if kind == 0:
        key = chance.choice(sorted(draft.others))
        return key, draft.others[key]
    if kind == 1 and chance.random() < 0.3:
        return keys.RUN, draft.run
    seq = _seq(draft, chance)
    return f"commit {seq}", draft.commits[seq]


def _inside(record: Any, chance: random.Random) -> tuple[Any, Any]:
    """Choose a container within a record, and one of its keys or indices."""
    while True:
        field = chance.choice(sorted(record)) if isinstance(record, dict) else chance.randrange(len(record))
        inner = record[field]
        if not (isinstance(inner, (dict, list)) and inner) or chance.random() < 0.2:
            return record, field
        record = inner


def _change_any_field(draft: ChainDraft, chance: random.Random) -> str:
    """Change any field of any record to anything, or remove it, or add another."""
    name, record = _any_record(draft, chance)
    container, field = _inside(record, chance)
    choice = chance.randrange(6)
    if choice == 0:
        del container[field]
    elif choice == 1 and isinstance(container, dict):
        container["more"] = chance.choice(_ODD)
    elif choice == 2:
        container[field] = chance.choice(_ODD)
    elif isinstance(container[field], int) or choice == 3:
        container[field] = _number(chance, container[field])
    elif isinstance(container[field], str) and container[field]:
        at = chance.randrange(len(container[field]))
        container[field] = container[field][:at] + chance.choice("0f/.-é\0") + container[field][at + 1 :]
    return f"{name}: {field} {['is removed', 'has a neighbour', 'is odd'][choice] if choice < 3 else 'is ' + repr(container[field])[:60]}"


def _change_shortcut(draft: ChainDraft, chance: random.Random) -> str:
    """Change the target, base or claims of a shortcut. Keep its key, or move it to the key that fits its new content."""
    key = chance.choice([key for key in draft.others if key.startswith((keys.ANCHORS, keys.SKIPS))] or [None])
    if key is None:
        return "no shortcut to change"
    record = copy.deepcopy(draft.others[key])
    slots = len(draft.commits)
    for reference in ("target", "base"):
        if isinstance(record.get(reference), dict) and chance.random() < 0.6:
            record[reference]["seq"] = chance.randrange(slots + 2)
    if chance.random() < 0.4:
        record["files"] = copy.deepcopy(chance.choice(draft.commits)["files"])
    target = record["target"]["seq"] if isinstance(record.get("target"), dict) else 0
    base = record.get("base")
    if isinstance(target, int) and chance.random() < 0.7:
        about = draft.commits[target] if target < slots else draft.commits[-1]
        record |= {"state_bytes": about.get("state_bytes"), "tensors": about.get("tensors")}
        if 0 <= target < 10**20:
            key = keys.anchor_key(target) if base is None else keys.skip_key(target, base["seq"]) if isinstance(base, dict) else key
    draft.others[key] = record
    return f"{key} leads from {base and base.get('seq')} to {target}"


def _change_files(draft: ChainDraft, chance: random.Random) -> str:
    """Change the files of a commit or shortcut: others, fewer, twice, in another order, with other sizes, or of another commit."""
    name, record = _any_record(draft, chance)
    files = record.get("files")
    if not isinstance(files, list) or not files or not all(isinstance(file, dict) for file in files):
        return f"{name} has no files to change"
    choice = chance.randrange(8)
    file = chance.choice(files)
    if choice == 0:
        files.remove(file)
    elif choice == 1:
        files.append(copy.deepcopy(file))
    elif choice == 2:
        chance.shuffle(files)
    elif choice == 3:
        record["files"] = copy.deepcopy(chance.choice(draft.commits).get("files"))
    elif choice == 4:
        other = copy.deepcopy(
            chance.choice([each for commit in draft.commits for each in commit.get("files") or [] if isinstance(each, dict)] or [file])
        )
        file |= {field: other.get(field) for field in ("key", "blake3", "size", *(["raw"] if chance.random() < 0.5 else []))}
    elif choice == 5:
        file["name"] = chance.choice(
            [None, "../x", "a/b", ".hidden", "MODEL.safetensors", "deltawire.json", "x.tmp", "config.json", "é" * 200]
        )
    else:
        field = chance.choice(["size", "raw", "first", "count"])
        file[field] = _number(chance, file.get(field))
    return f"files of {name}, choice {choice}"


def _change_data(draft: ChainDraft, chance: random.Random) -> str:
    """Change the content of a data object. Every record that names the object gets its new, right name."""
    old = chance.choice(sorted(draft.data))
    data, how = _other_content(draft.data[old], chance)
    digest = blake3(data).hexdigest()
    new = old.replace(old.split("/")[-1].split(".")[0], digest)
    draft.data[new] = data
    for record in [*draft.commits, *draft.others.values()]:
        for file in record.get("files") or []:
            if isinstance(file, dict) and file.get("key") == old:
                file |= {"key": new, "blake3": digest, "size": len(data)}
        if isinstance(record.get("list"), dict) and record["list"].get("key") == old:
            record["list"] |= {"key": new, "size": len(data)}
    return f"content of {old[-90:-60]}…: {how}"


def _change_list(draft: ChainDraft, chance: random.Random) -> str:
    """Change a file list, or what its record says about it. The record gets the right name of the changed list."""
    name, record = chance.choice([(key, each) for key, each in _all_records(draft) if isinstance(each.get("list"), dict)] or [("", {})])
    reference = record.get("list")
    if reference is None or draft.data.get(reference.get("key")) is None:
        return "no file list to change"
    listed = parse(draft.data[reference["key"]])
    rows = listed["files"]
    choice = chance.randrange(8)
    if choice == 0:
        rows.pop(chance.randrange(len(rows)))
    elif choice == 1:
        rows.append(copy.deepcopy(chance.choice(rows)))
    elif choice == 2:
        chance.shuffle(rows)
    elif choice == 3:
        rows[:] = rows * chance.choice([2, 1000, 70000])
    elif choice == 4:
        listed[chance.choice(["version", "deltawire", "more"])] = chance.choice([2, 0, "commit", None])
    elif choice == 5:
        reference[chance.choice(["size", "files", "bytes"])] = _number(chance, reference.get("size"))
    else:
        row, column = chance.choice(rows), chance.randrange(6)
        row[column] = chance.choice([_number(chance, row[column]), *_ODD])
    with contextlib.suppress(ValueError):
        data = json.dumps(listed, sort_keys=True, separators=(",", ":")).encode()
        reference["key"] = f"{reference['key'].rpartition('/')[0]}/{blake3(data).hexdigest()}.file"
        draft.data[reference["key"]] = data
        if chance.random() < 0.8 and choice != 5:
            sizes = [row[1] for row in rows if isinstance(row, list) and isinstance(row[1], int)]
            reference |= {"size": len(data), "files": len(rows), "bytes": sum(sizes)}
    return f"file list of {name}, choice {choice}"


def _all_records(draft: ChainDraft) -> list[tuple[str, Record]]:
    return [*((f"commit {seq}", commit) for seq, commit in enumerate(draft.commits)), *sorted(draft.others.items())]


def _other_content(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    choice = chance.randrange(6)
    if choice == 0:
        at = chance.randrange(len(data) + 1)
        return data[:at], f"cut at {at}"
    if choice == 1:
        return data + bytes(chance.randrange(1, 40)), "longer"
    with contextlib.suppress(Exception):  # data that are not a delta are changed in another way
        split = split_delta(data)
        if choice == 2:
            split = split._replace(**{chance.choice(["before", "after"]): b"\xff" * 16})
        elif choice == 3 and split.groups:
            group = chance.choice(sorted(split.groups))
            at = chance.randrange(len(split.groups[group]))
            payload = split.groups[group]
            split.groups[group] = payload[:at] + bytes([chance.randrange(256)]) + payload[at + 1 :]
        elif choice == 4 and split.groups:
            payload = split.groups.pop(chance.choice(sorted(split.groups)))
            split.groups[chance.randrange(64)] = payload
        elif choice == 5:
            split = split._replace(tensors=chance.choice([0, split.tensors + 1, 2**39]))
        if data.startswith(b"dwdelta3"):
            return join_delta(split), f"another delta, choice {choice}"
    flipped = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        flipped[chance.randrange(min(len(flipped), chance.choice([8, 200, 10**9])))] ^= 1 << chance.randrange(8)
    return bytes(flipped), "bits flipped"


def _lose_data(draft: ChainDraft, chance: random.Random) -> str:
    key = chance.choice(sorted(draft.data))
    del draft.data[key]
    return f"{key[-90:-60]}… is missing"


def _change_order(draft: ChainDraft, chance: random.Random) -> str:
    """Remove commits at the end, repeat or swap some, or give one to an earlier writer. Renumber them or not."""
    choice = chance.randrange(4)
    seq = chance.randrange(1, len(draft.commits))
    if choice == 0:
        del draft.commits[seq + 1 :]
    elif choice == 1:
        draft.commits.insert(seq, copy.deepcopy(chance.choice(draft.commits)))
    elif choice == 2:
        other = chance.randrange(1, len(draft.commits))
        draft.commits[seq], draft.commits[other] = draft.commits[other], draft.commits[seq]
    else:
        late = copy.deepcopy(draft.commits[seq])
        late["epoch"] = chance.choice([0, 1, 2, 4])
        draft.commits.insert(seq, late)
    if chance.random() < 0.9:
        for number, commit in enumerate(draft.commits):
            if commit.get("state_seq") == commit.get("seq"):
                commit["state_seq"] = number
            commit["seq"] = number
    return f"order of commits, choice {choice} at {seq}"


def _change_epochs(draft: ChainDraft, chance: random.Random) -> str:
    """Change epochs: one resumes from any version, is missing, or is claimed although no writer used it."""
    number = chance.choice([1, 2, 3, 3, 3, 4, 5])
    key = keys.epoch_key(number)
    choice = chance.randrange(3)
    if choice == 0:
        draft.others.pop(key, None)
    else:
        template = next((copy.deepcopy(record) for each, record in draft.others.items() if each.startswith(keys.EPOCHS)), None)
        if template is None:
            return "no epoch to change"
        record = draft.others.setdefault(key, template | {"epoch": number})
        begins = next((seq for seq, commit in enumerate(draft.commits) if commit.get("epoch") == number), 0)
        record["resumed_from"] = chance.choice([None, begins, begins + 1, chance.randrange(len(draft.commits) + 2), _number(chance)])
        if choice == 2:
            draft.others[keys.epoch_key(chance.randrange(10**9))] = copy.deepcopy(record)
    return f"{key}, choice {choice}: {draft.others.get(key, {}).get('resumed_from', 'removed')}"


def _change_marks_and_pins(draft: ChainDraft, chance: random.Random) -> str:
    choice = chance.randrange(4)
    mark = next((copy.deepcopy(record) for key, record in draft.others.items() if key.startswith(keys.MARKS)), None)
    if choice == 0 and mark is not None:
        number = chance.choice([0, 2, 3, 10**9])
        draft.others[keys.mark_key(number)] = mark | {"mark": number, "floor": chance.choice([0, 5, 13, 15, 10**6, 2**62])}
    elif choice == 1:
        pin = draft.others.get(keys.pin_key("reader"))
        if pin is not None:
            pin |= {"seq": _number(chance, pin.get("seq")), "ttl": chance.choice([0, 1, 10**9, 10**15, 2**63 - 1])}
    elif choice == 2 and keys.HEAD in draft.others:
        draft.others[keys.HEAD]["seq"] = _number(chance, draft.others[keys.HEAD].get("seq"))
    else:
        limits = draft.run.get("limits")
        if isinstance(limits, dict) and limits:
            limits[chance.choice(sorted(limits))] = chance.choice([0, 1, 3, 4, 100, 1500, 2**40, 2**63 - 1])
    return f"marks, pins, HEAD and limits, choice {choice}"


def _unlink(draft: ChainDraft, chance: random.Random) -> str:
    draft.unlinked = True
    return "hashes are not made right"


MUTATIONS: list[tuple[Callable[[ChainDraft, random.Random], str], int]] = [
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
    draft = copy.deepcopy(draft_of(seed))
    # Chains without lists keep their own choice, so that a seed which once found something still makes the same chain.
    mutations, weights = zip(*MUTATIONS, *([(_change_list, 40)] if has_lists(seed) else []), strict=True)
    for _ in range(0 if seed == 0 else chance.choice([1, 1, 1, 2, 2, 3])):
        for mutate in chance.choices(mutations, weights):
            # an earlier change removed what this one would change
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                draft.done.append(mutate(draft, chance))
    return linked_store(draft, chance), draft.done
