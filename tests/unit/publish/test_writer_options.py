"""Test what `WriterOptions` accepts, and check that every writer passes it on."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import deltawire
from deltawire import Publisher, WriterOptions
from deltawire.format.records.signing import SigningKey
from deltawire.publish.sharded import ShardedPublisher


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"trusted_keys": ["00" * 32]}, "signing_key"),
        ({"auto_collect": -1.0}, "auto_collect"),
        ({"auto_collect": float("inf")}, "auto_collect"),
        ({"auto_collect": float("nan")}, "auto_collect"),
        ({"segment_bytes": 0}, "segment_bytes"),
        ({"shard_bytes": 0}, "shard_bytes"),
    ],
)
def test_options_that_cannot_work_are_refused(given, match):
    with pytest.raises(ValueError, match=match):
        WriterOptions(**given)


def test_keys_that_are_none_are_refused_with_the_remedy():
    key = deltawire.SigningKey.generate()
    with pytest.raises(TypeError, match=r"signing_key is a str: load the key with SigningKey\.load\(path\)"):
        WriterOptions(signing_key="trainer.key")
    with pytest.raises(ValueError, match="trusted_keys holds 'zz', which is not a public key: that has 64 hexadecimal digits"):
        WriterOptions(signing_key=key, trusted_keys=["zz"])
    with pytest.raises(TypeError, match=r"pass \[key\]"):
        WriterOptions(signing_key=key, trusted_keys=key.public)
    with pytest.raises(TypeError, match="trusted_keys holds a SigningKey"):
        WriterOptions(signing_key=key, trusted_keys=[key])


def test_a_writer_accepts_chains_of_its_own_key_and_of_trusted_keys():
    old, new = SigningKey.generate(), SigningKey.generate()
    assert WriterOptions().accepted_keys == frozenset()
    assert WriterOptions(signing_key=new, trusted_keys=[old.public]).accepted_keys == {old.public, new.public}


def test_every_field_is_documented():
    documented = re.findall(r"^    (\w+)\n        \S", WriterOptions.__doc__, re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(WriterOptions)]


@pytest.mark.parametrize("writer", [Publisher, ShardedPublisher])
def test_no_writer_repeats_a_field_as_a_parameter(writer):
    fields = {field.name for field in dataclasses.fields(WriterOptions)}
    assert not fields & inspect.signature(writer).parameters.keys()
