"""Test the signatures of records."""

import dataclasses
import os

import pytest

from deltawire import Digest
from deltawire.errors import SignatureInvalid
from deltawire.format.records.record_parts import CommitRef, FileEntry, Signature
from deltawire.format.records.signing import SigningKey, check_signature
from deltawire.format.records.version_records import Commit, Shortcut

ID, HASH = "0123456789abcdef" * 2, "ab" * 32
COMMIT = Commit(ID, 0, 1, ID, "fence", None, (), None, None, 0, None, 0, 0, 0, None, 1, ())
ENTRY = FileEntry(f"data/0000000001/00000000000000000001/{HASH}.safetensors", 9, 9, HASH, "model.safetensors")
SHORTCUT = Shortcut(ID, 1, ID, 1, CommitRef(3, HASH, Digest()), None, 9, 1, (ENTRY,))


@dataclasses.dataclass(frozen=True)
class Note:
    """A record type that signing does not know."""

    text: str
    signature: Signature | None = None

    def describe(self):
        return "the note"

    def to_bytes(self):
        return f"note {self.text} {self.signature}".encode()


@pytest.fixture(scope="module")
def key():
    return SigningKey.generate()


@pytest.mark.parametrize("record", [COMMIT, SHORTCUT], ids=["commit", "shortcut"])
def test_a_reader_that_trusts_the_key_accepts_a_signed_record(key, record):
    signed = key.sign(record)
    assert type(record).parse(signed.to_bytes()) == signed
    check_signature(signed, [key.public])
    check_signature(signed, [SigningKey.generate().public, key.public])
    assert key.sign(signed) == signed


@pytest.mark.parametrize("record", [COMMIT, SHORTCUT], ids=["commit", "shortcut"])
def test_a_record_that_no_trusted_key_signed_is_refused(key, record):
    signed = key.sign(record)
    stranger = SigningKey.generate()
    for wrong in (
        record,
        stranger.sign(record),
        dataclasses.replace(signed, signature=Signature(key.public, stranger.sign(record).signature.ed25519)),
    ):
        with pytest.raises(SignatureInvalid):
            check_signature(wrong, [key.public])


def test_a_change_of_any_kind_breaks_the_signature(key):
    signed = key.sign(COMMIT)
    for change in ({"time": 2}, {"nonce": "f" * 32}, {"step": 1}, {"meta": {"a": "b"}}, {"epoch": 2}):
        with pytest.raises(SignatureInvalid):
            check_signature(dataclasses.replace(signed, **change), [key.public])


def test_any_record_with_a_signature_field_can_be_signed_and_checked(key):
    signed = key.sign(Note("hello"))
    check_signature(signed, [key.public])
    with pytest.raises(SignatureInvalid, match="the note is not signed"):
        check_signature(Note("hello"), [key.public])
    with pytest.raises(SignatureInvalid, match="the signature of the note is wrong"):
        check_signature(dataclasses.replace(signed, text="hallo"), [key.public])


def test_a_key_that_is_no_point_of_the_curve_is_refused(key):
    for public in ("ff" * 32, "00" * 32):
        with pytest.raises(SignatureInvalid):
            check_signature(dataclasses.replace(COMMIT, signature=Signature(public, "00" * 64)), [public])


def test_a_reader_without_trusted_keys_needs_no_signature(key):
    check_signature(COMMIT, [])
    check_signature(key.sign(COMMIT), [])


def test_a_key_is_saved_for_its_owner_alone(key, tmp_path):
    path = tmp_path / "key"
    key.save(path)
    assert SigningKey.load(path).public == key.public
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)
        with pytest.raises(ValueError, match="chmod 600"):
            SigningKey.load(path)
    with pytest.raises(FileExistsError):
        key.save(path)


@pytest.mark.parametrize(
    "content", ["", "secret", "deltawire ed25519 signing key v1\nabc\n", "deltawire ed25519 signing key v1\n" + "x" * 64]
)
def test_another_file_is_not_a_key(tmp_path, content):
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ValueError):  # noqa: PT011
        SigningKey.load(path)


def test_the_secret_is_not_shown(key, tmp_path):
    key.save(tmp_path / "key")
    secret = (tmp_path / "key").read_text().split()[-1]
    assert secret not in repr(key)
    assert key.public in repr(key)
