"""Every release can follow the chains that an earlier release wrote, and continue them with records of the current version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from blake3 import blake3
from make_chains import CONFIG, HERE, OPTIONS, state_at
from support import bits_of

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import SignatureInvalid
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.publish.publisher import Publisher
from deltawire.store.local import LocalStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.model_files import read_model_files
from deltawire.subscribe.pull import pull

KEY = "f04c0e62a31374f8e9598438b043ec53e6e5b6a345de57ad83ab3de03c440b5f"
STEPS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 8: 3, 9: 4}
"""The training step of each version of the unsigned chain. Commit 7 is a fence, and version 8 a rewind to version 4."""


@pytest.fixture(params=["v1", "v1-signed"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    """Return a copy of a golden chain, because readers write pins and tests may write to the directory."""
    shutil.copytree(HERE / request.param, tmp_path / request.param)
    return LocalStore(tmp_path / request.param)


def test_golden_chains_are_untouched() -> None:
    hasher = blake3()
    for path in sorted(path for path in HERE.rglob("*") if path.is_file()):
        hasher.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes())
    assert hasher.hexdigest() == "712da788f599bad7bf06ed0d12f584d0c6f5993444c166b157cc13b98199f44a"


def test_golden_chains_are_of_version_1() -> None:
    for path in HERE.rglob("*.json"):
        assert json.loads(path.read_bytes())["version"] == 1


def test_golden_chains_are_sound(chain: LocalStore) -> None:
    report = verify(chain, deep=True)
    assert report.problems == []
    assert report.rebuilt == report.versions


def test_every_version_of_a_golden_chain_can_be_read(chain: LocalStore, tmp_path: Path) -> None:
    signed = chain.url.endswith("signed")
    steps = {1: 0, 2: 1} if signed else STEPS
    options = ReaderOptions(trusted_keys=[KEY] if signed else [], pin=False)
    with Subscriber(chain, tmp_path / "mirror", options=options) as mirror, Subscriber(chain, options=options) as memory:
        for seq, step in steps.items():
            for reader in (mirror, memory):
                assert reader.sync(seq=seq).step == step
                assert bits_of(reader.state) == bits_of(state_at(step))
            assert mirror.path is not None
            assert (mirror.path / "config.json").read_bytes() == CONFIG["config.json"]
            pull(chain, tmp_path / str(seq), seq=seq, options=options)
            assert (tmp_path / str(seq) / "config.json").read_bytes() == CONFIG["config.json"]
    assert read_model_files(chain).files == CONFIG
    versions = ChainVersions(ChainLog(chain))
    assert [versions.find(seq).live for seq in steps] == [seq < 5 or seq > 7 for seq in steps]


def test_a_golden_chain_continues(chain: LocalStore, tmp_path: Path) -> None:
    if chain.url.endswith("signed"):  # its secret key was not kept
        with pytest.raises(SignatureInvalid):
            Publisher(chain, options=OPTIONS)
        return
    with Subscriber(chain, tmp_path / "mirror", options=ReaderOptions(pin=False)) as reader:
        reader.sync()
        with Publisher(chain, options=OPTIONS) as publisher:
            publisher.publish(state_at(5), step=5)
        assert reader.sync().seq == 11
        assert bits_of(reader.state) == bits_of(state_at(5))
        assert reader.path is not None
        assert (reader.path / "config.json").read_bytes() == CONFIG["config.json"]
    assert verify(chain, deep=True).problems == []
