"""The parts of records: references, files, signatures, limits, and the forms of hashes and names (docs/protocol.md §2)."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ...errors import LimitExceeded
from ..checkpoints.checkpoint import is_plain_file_name
from ..digest import Digest
from .canonical import MAX_INTEGER, Fields

if TYPE_CHECKING:
    from .version_records import Commit, Shortcut

HASH = re.compile(r"[0-9a-f]{64}")
NONCE = re.compile(r"[0-9a-f]{32}")
READER = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_DATA_KEY = re.compile(r"data/[0-9]{10}/[0-9]{20}/([0-9a-f]{64})\.(safetensors|file)")
_MAX_FILE_NAME = 255
_RECIPE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_RECIPE_OPTION = re.compile(r"[a-z][a-z0-9_]{0,63}")
MAX_RUN_NAME = 200
MAX_EPOCH = 10**10 - 2
"""The highest number of an epoch or mark. This number and the next one both have ten digits."""


def record_hash(data: bytes) -> str:
    """Return the hash by which other records refer to this one: BLAKE3 of its bytes."""
    return blake3(data).hexdigest()


def link_targets(seq: int) -> list[int]:
    """Return the seqs that a commit links to besides its parent: seq − 2^k for every k ≥ 1 with 2^k dividing seq, by rising k."""
    return [seq - (1 << k) for k in range(1, (seq & -seq).bit_length())] if seq > 0 else []


def is_data_key(key: str) -> bool:
    """Return whether `key` has the form of a data object's key. Only such keys are read or deleted because a record names them."""
    return _DATA_KEY.fullmatch(key) is not None


def is_reader_name(name: str) -> bool:
    """Return whether a pin may have this name."""
    return READER.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a record may claim: bytes and tensors of a state, and bytes of one object. No more memory is allocated."""

    state_bytes: int = 8 << 40
    tensors: int = 1 << 20
    file_bytes: int = 64 << 30

    def within(self, other: Limits) -> Limits:
        """Return the smaller of both limits, field by field."""
        return Limits(min(self.state_bytes, other.state_bytes), min(self.tensors, other.tensors), min(self.file_bytes, other.file_bytes))

    def check(self, record: Commit | Shortcut) -> None:
        """Raise `LimitExceeded` if the record claims more than this."""
        entries = record.named_objects
        listed = 0 if record.file_list is None else record.file_list.bytes
        claims = [("bytes of weights", record.state_bytes, self.state_bytes), ("tensors", record.tensors, self.tensors)]
        claims += [(f"bytes in {entry.key}", max(entry.size, entry.raw), self.file_bytes) for entry in entries]
        claims.append(("bytes in all its files", listed + sum(entry.size for entry in entries), self.state_bytes + self.file_bytes))
        for what, claimed, allowed in claims:
            if claimed > allowed:
                raise LimitExceeded(f"{record.describe()} claims {claimed:,} {what}; {allowed:,} are allowed.")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One data object: `raw` bytes of weights in `size` bytes of file.

    A file of a checkpoint has a `name`. A delta segment has no name, but covers `count` tensors from number `first` on, in the order of all
    tensor names.
    """

    key: str
    size: int
    raw: int
    blake3: str
    name: str | None = None
    first: int | None = None
    count: int | None = None

    def plain(self) -> dict[str, Any]:
        names = ("key", "size", "raw", "blake3", "name", "first", "count")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, fields: Fields) -> FileEntry:
        entry = cls(
            key=fields.text("key"),
            size=fields.integer("size"),
            raw=fields.integer("raw"),
            blake3=fields.matching("blake3", HASH),
            name=fields.nullable("name", fields.text),
            first=fields.nullable("first", fields.integer),
            count=fields.nullable("count", fields.integer),
        )
        fields.done()
        form = _DATA_KEY.fullmatch(entry.key)
        if form is None or form[1] != entry.blake3:
            fields.refuse(f"{entry.key!r} is not the key of a data object with that hash")
        if entry.name is not None and not _is_checkpoint_file_name(entry.name):
            fields.refuse(f"{entry.name!r} is not a plain file name")
        if form[2] != ("safetensors" if entry.name is None or entry.name.endswith(".safetensors") else "file"):
            fields.refuse(f"the suffix of {entry.key!r} does not fit what it is")
        if form[2] == "file" and entry.raw:
            fields.refuse(f"{entry.name!r} holds no weights")
        return entry


@dataclass(frozen=True, slots=True)
class CommitRef:
    """A reference to a commit: its seq and the hash of its bytes. `digest` is the digest of its state, or None for an empty chain."""

    seq: int
    commit: str
    digest: Digest | None

    def plain(self) -> dict[str, Any]:
        return {"seq": self.seq, "commit": self.commit, "digest": hex_or_none(self.digest)}

    @classmethod
    def of(cls, fields: Fields) -> CommitRef:
        reference = cls(fields.integer("seq"), fields.matching("commit", HASH), read_digest(fields))
        fields.done()
        return reference


@dataclass(frozen=True, slots=True)
class Signature:
    """An Ed25519 signature and its public key, both in hexadecimal."""

    key: str
    ed25519: str

    def plain(self) -> dict[str, Any]:
        return {"key": self.key, "ed25519": self.ed25519}

    @classmethod
    def of(cls, fields: Fields) -> Signature:
        signature = cls(fields.matching("key", HASH), fields.matching("ed25519", _SIGNATURE))
        fields.done()
        return signature


_SHORT = reprlib.Repr()
_SHORT.maxlist, _SHORT.maxdict = 1, 8


@dataclass(frozen=True, slots=True)
class RecipeRecord:
    """Says how a version was quantised: the recipe, its release, and its options.

    Readers need not know the recipe: the tensors and config.json of the version say how engines load it.

    Parameters
    ----------
    name
        The name of the recipe, such as "fp8-block".
    release
        The release of the recipe. The same weights become other bytes in another release.
    options
        The options of the recipe, by name: strings, integers, booleans, or lists of strings.
    """

    name: str
    release: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} (release {self.release})"

    def __repr__(self) -> str:
        """Show only the beginning of long options, such as `ignore`, which lists patterns."""
        return f"RecipeRecord(name={self.name!r}, release={self.release}, options={_SHORT.repr(dict(self.options))})"

    def makes_same_tensors(self, other: RecipeRecord | None) -> bool:
        """Tell whether a version of this recipe can follow a version of the other one by a delta: only the option `sticky` may differ."""
        if other is None or (self.name, self.release) != (other.name, other.release):
            return False
        mine, theirs = ({name: value for name, value in each.options.items() if name != "sticky"} for each in (self, other))
        return mine == theirs

    def plain(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        return {"name": self.name, "release": self.release, "options": dict(self.options)}


def hex_or_none(digest: Digest | None) -> str | None:
    return None if digest is None else digest.hex()


def read_digest(fields: Fields) -> Digest | None:
    text = fields.nullable("digest", lambda name: fields.matching(name, NONCE))
    return None if text is None else Digest.from_hex(text)


def read_run_name(fields: Fields) -> str:
    name = fields.text("run")
    if not 1 <= len(name) <= MAX_RUN_NAME:
        fields.refuse(f"a run's name has 1 to {MAX_RUN_NAME} characters")
    return name


def read_short(fields: Fields, name: str) -> int:
    """Return a number that has ten digits in keys. The next number must fit too, because readers ask for its key."""
    number = fields.integer(name)
    if number > MAX_EPOCH:
        fields.refuse(f"{name} {number} is out of range")
    return number


def read_recipe(fields: Fields) -> RecipeRecord:
    """Read how a version was quantised. Options of later releases are accepted: readers do not need them."""
    inner = fields.object("recipe")
    name, release = inner.matching("name", _RECIPE_NAME), inner.integer("release")
    if release < 1:
        inner.refuse("release must be at least 1")
    options = inner.mapping("options")
    for option, value in options.items():
        each = value if isinstance(value, list) else [value]
        if not (_RECIPE_OPTION.fullmatch(option) and all(_is_option(item, in_list=isinstance(value, list)) for item in each)):
            inner.refuse(f"{option!r} is not an option of a recipe")
    inner.done()
    return RecipeRecord(name, release, options)


def _is_option(value: Any, *, in_list: bool) -> bool:
    if isinstance(value, str):
        return value.isprintable()  # half a character is not printable, either
    return not in_list and isinstance(value, int) and 0 <= value <= MAX_INTEGER


def read_signature(fields: Fields) -> Signature | None:
    return fields.nullable("signature", lambda name: Signature.of(fields.object(name)))


def holds_weights(name: str) -> bool:
    """Return whether a file of this name holds or lists weights. An attachment never has such a name."""
    return name.lower().endswith((".safetensors", ".safetensors.index.json"))


def plain_attachment(entry: FileEntry) -> dict[str, Any]:
    """Return an attachment as it is written in a record. Its hash is part of its key."""
    return {"name": entry.name, "key": entry.key, "size": entry.size}


def read_attachments(fields: Fields) -> tuple[FileEntry, ...]:
    """Read the attachments of a commit: plain files, ordered by name, whose names differ in more than case."""
    entries = tuple(_attachment(inner) for inner in fields.objects("attachments"))
    names = [str(entry.name) for entry in entries]
    if names != sorted(names) or len({name.casefold() for name in names}) != len(names):
        fields.refuse("its attachments are not ordered by name, or two names differ by case only")
    return entries


def _attachment(fields: Fields) -> FileEntry:
    name, key, size = fields.text("name"), fields.text("key"), fields.integer("size")
    fields.done()
    form = _DATA_KEY.fullmatch(key)
    if form is None or form[2] != "file":
        fields.refuse(f"{key!r} is not the key of an attachment")
    if not _is_checkpoint_file_name(name) or holds_weights(name):
        fields.refuse(f"{name!r} cannot name an attachment")
    return FileEntry(key, size, 0, form[1], name)


def read_links(fields: Fields) -> tuple[tuple[int, str], ...]:
    links = []
    for link in fields.items("links"):
        if not (
            isinstance(link, list)
            and len(link) == 2
            and type(link[0]) is int
            and 0 <= link[0] <= MAX_INTEGER
            and isinstance(link[1], str)
            and HASH.fullmatch(link[1])
        ):
            fields.refuse("its links are malformed")
        links.append((link[0], link[1]))
    return tuple(links)


def _is_checkpoint_file_name(name: str) -> bool:
    printable = all(character.isprintable() for character in name)
    return is_plain_file_name(name) and printable and not name.startswith(".") and len(name.encode()) <= _MAX_FILE_NAME
