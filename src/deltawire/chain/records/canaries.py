"""Read and write canary records: what a healthy engine generates with a version (docs/protocol.md §2)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from ...errors import CorruptRecord, SignatureInvalid
from ...format.records.canary_records import CanaryRecord, RecordedTokens
from ...format.records.run_records import check_same_run
from ...format.records.signing import SigningKey, check_signature
from ...format.records.version_records import Commit
from ...store import keys
from ...store.create_rule import create_and_look
from ..log import ChainLog


def read_canary(log: ChainLog, commit: Commit) -> CanaryRecord | None:
    """Return the canary record of a version, or None if there is none. Everyone who can write to the store may have put it there.

    Raises `CorruptRecord`, `UnsupportedVersion` or `SignatureInvalid` if it cannot be trusted, and the errors of the store.

    Parameters
    ----------
    log
        The chain.
    commit
        The commit of the version.
    """
    key = keys.canary_key(commit.seq)
    data = log.object(key)
    if data is None:
        return None
    record = CanaryRecord.parse(data)
    check_same_run(record.id, log.run, key)
    if record.target != log.ref(commit):
        raise CorruptRecord(f"{key} in {log.store.url} is not about commit {commit.seq} of this chain.")
    check_signature(record, log.trusted_keys)
    return record


def put_canary(
    log: ChainLog, commit: Commit, recorded: Sequence[RecordedTokens], *, key: SigningKey | None = None, replace: bool = False
) -> CanaryRecord:
    """Create the canary record of a version. Returns the record that the store then has.

    An earlier record stays, unless it is unusable or `replace` is True.

    Raises `SignatureInvalid` if readers of `log` would not trust the record, `CorruptRecord` if it exceeds a limit, and the errors of the
    store.

    Parameters
    ----------
    log
        The chain.
    commit
        The commit of the version.
    recorded
        What a healthy engine generated.
    key
        The key to sign the record with. Readers with trusted keys need one of theirs.
    replace
        True to replace an earlier record that is usable.
    """
    record = CanaryRecord(log.run.id, secrets.token_hex(16), int(time.time() * 1000), log.ref(commit), tuple(recorded))
    record = record if key is None else key.sign(record)
    check_signature(record, log.trusted_keys)
    data = record.to_bytes()
    if replace:
        log.store.put(keys.canary_key(commit.seq), data)
        return CanaryRecord.parse(data)
    try:
        found = read_canary(log, commit)
        if found is None:
            create_and_look(log.store, keys.canary_key(commit.seq), data)
            found = read_canary(log, commit)
    except (CorruptRecord, SignatureInvalid):  # anyone who can write to the store may have put it there
        log.store.put(keys.canary_key(commit.seq), data)
        found = read_canary(log, commit)
    return CanaryRecord.parse(data) if found is None else found
