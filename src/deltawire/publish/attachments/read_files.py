"""Read the attachments that the user gives, such as config.json and the tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import CheckpointError, LimitExceeded
from ...format.checkpoints.checkpoint import MIRROR_RECORD_FILE, is_plain_file_name
from ...format.checkpoints.checkpoint_copy import WEIGHT_SUFFIXES
from ...format.records.record_parts import Limits, holds_weights

Attachments = Mapping[str, bytes | Path] | Path | str
"""File names with contents or paths; or a directory, of which weights, hidden files and the record of a mirror are left out."""


class CollectedFiles(Mapping[str, "bytes | Path"]):
    """The files that the user gave and those of the model and its tokenizer. The user's files replace others of the same name."""

    def __init__(self, given: Attachments | None) -> None:
        self._given = given
        self.taken: dict[str, bytes] = {}
        """Files of the model."""
        self.of_tokenizer: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes | Path:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def _now(self) -> dict[str, bytes | Path]:
        given = self._given or {}
        return {**self.taken, **self.of_tokenizer, **(given if isinstance(given, Mapping) else _in_directory(Path(given)))}


MOST_FILES, MOST_NAME_BYTES = 40, 2048
"""Most attachments, and most bytes of their names. A record has no room for more."""


def read_attachments(source: Attachments | None) -> dict[str, bytes] | None:
    """Read names and contents as they are now. Returns None if there is no source.

    Raises `CheckpointError` if a file cannot be read, or cannot be part of a checkpoint.
    """
    if source is None:
        return None
    named = source if isinstance(source, Mapping) else _in_directory(Path(source))
    if len(named) > MOST_FILES:
        raise CheckpointError(f"{len(named)} files are to go with the weights; at most {MOST_FILES} can. Attach only what loading needs.")
    folded: dict[str, str] = {}
    for name in named:
        _check_name(name)
    if sum(len(json.dumps(name)) for name in named) > MOST_NAME_BYTES:
        raise CheckpointError("the attachments' names are too long together. Attach only what loading needs.")
    for name in named:
        twin = folded.setdefault(name.casefold(), name)
        if twin != name:
            raise CheckpointError(f"the attachments {twin!r} and {name!r} differ by case only. Rename one.")
    return {name: _content(name, content) for name, content in sorted(named.items())}


def check_sizes(files: Mapping[str, bytes], limits: Limits) -> None:
    """Raise `LimitExceeded` if a run with these limits does not allow one of the files."""
    for name, data in files.items():
        if len(data) > limits.file_bytes:
            raise LimitExceeded(f"the attachment {name!r} has {len(data):,} bytes; this run allows {limits.file_bytes:,} in one file.")


def _in_directory(directory: Path) -> dict[str, bytes | Path]:
    try:
        found = [path for path in directory.iterdir() if path.is_file()]
    except OSError as error:
        raise CheckpointError(f"the directory of attachments cannot be read: {error}. Pass the directory of a checkpoint.") from error
    plain = [path for path in found if not path.name.startswith(".") and path.name != MIRROR_RECORD_FILE]
    return {path.name: path for path in plain if not path.name.lower().endswith(WEIGHT_SUFFIXES)}


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not is_plain_file_name(name) or name.startswith(".") or not name.isprintable():
        raise CheckpointError(f"the attachment {name!r} has no plain file name. Use one without separators that is not hidden.")
    if len(name.encode(errors="replace")) > 255:
        raise CheckpointError(f"the name of the attachment {name!r} is too long. Use at most 255 bytes.")
    if name.casefold() == MIRROR_RECORD_FILE:
        raise CheckpointError(f"the attachment {name!r} has the name of the record that mirrors keep, and would be lost. Use another name.")
    if holds_weights(name):
        raise CheckpointError(f"the attachment {name!r} has the name of weights. Weights are written from the state; leave it out.")


def _content(name: str, content: object) -> bytes:
    if isinstance(content, (bytes, bytearray, memoryview)):
        return bytes(content)
    if not isinstance(content, (Path, str)):
        raise CheckpointError(f"the attachment {name!r} is a {type(content).__qualname__}. Pass bytes or a path.")
    try:
        return Path(content).read_bytes()
    except OSError as error:
        raise CheckpointError(f"the attachment {name!r} cannot be read: {error}. Is the path right?") from error
