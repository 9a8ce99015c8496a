"""URLs name stores or are refused. The error does not repeat a URL that contains secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import run_python

from deltawire import Publisher
from deltawire.errors import BadUrl, CheckpointError, LocationOccupied, MirrorError, StoreError
from deltawire.store import StoreOptions, open_store
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.store.occupancy import is_chain_directory
from deltawire.store.urls import default_run_name
from deltawire.subscribe import Subscriber, pull
from deltawire.subscribe.mirror.mirror import Mirror


def test_paths_and_file_urls_are_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (tmp_path / "x", str(tmp_path / "x"), f"file://{tmp_path}/x", f"file://localhost{tmp_path}/x", "x", "./x"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "x"
    assert open_store(store) is store
    spaced = open_store(f"file://{tmp_path}/with%20space")
    assert isinstance(spaced, LocalStore)
    assert spaced.root == tmp_path / "with space"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/some/prefix/", "s3://bucket/some/prefix"),
        ("gs://bucket/prefix", "gs://bucket/prefix"),
        ("az://container/prefix", "az://container/prefix"),
        ("hf://buckets/owner/name", "hf://buckets/owner/name"),
        ("hf://buckets/owner/name/prefix", "hf://buckets/owner/name/prefix"),
    ],
)
def test_services_are_opened_without_a_request(url: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.setenv(name, "name")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    with open_store(url) as store:
        assert store.url == shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host/path",
        "s3://",
        "s3:///key",
        "s3://bucket/../other",
        "s3://bucket//double",
        "s3://[bucket/prefix",
        "s3://bucket?prefix=elsewhere",
        "s3://bucket?endpoint=elsewhere",
        "s3://bucket?endpoint=http://user:secret@host",
        "s3://bucket?endpoint=http://[::1",
        "s3://bucket?region=a&region=b",
        "s3://bucket?region",
        "s3://bucket#part",
        "gs://bucket?region=a",
        "hf://models/owner/name",
        "hf://buckets/owner",
        "memory://",
        "file://host/path",
        "file://relative",
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(BadUrl):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket/x", "s3://bucket/x"),
        ("s3:bucket/x", "s3://bucket/x"),
        ("S3//bucket/x", "s3://bucket/x"),
        ("s3:///bucket/x", "s3://bucket/x"),
        ("s3a://bucket/x", "s3://bucket/x"),
        ("gs:/bucket", "gs://bucket"),
        ("gcs://bucket/x", "gs://bucket/x"),
        ("azure:/container", "az://container"),
        ("file:/data/x", "file:///data/x"),
        ("hf:/buckets/owner/name", "hf://buckets/owner/name"),
        ("hf://owner/name", "hf://buckets/owner/name"),
        ("hf://models/owner/name", "hf://buckets/owner/name"),
        ("https://bucket.example.com/x", "AWS_ENDPOINT_URL=https://bucket.example.com"),
        ("http//host/x", "./http//host/x"),
        ("ssh:host/x", "./ssh:host/x"),
        ("s3;//bucket/x", "s3://bucket/x"),
        ("s3.//bucket/x", "s3://bucket/x"),
        ("s3. //bucket/x", "s3://bucket/x"),
        ("s3;/bucket/x", "s3://bucket/x"),
        ("s3,bucket", "s3://bucket"),
        ("s3\uff1a//bucket/x", "s3://bucket/x"),  # a full-width colon
        ("s3\u2236//bucket", "s3://bucket"),  # a ratio sign
        ("s33//bucket", "./s33//bucket"),
        ("10.0.0.1:9000/bucket", "AWS_ENDPOINT_URL=http://10.0.0.1:9000 "),
        ("[::1]:9000/bucket", "AWS_ENDPOINT_URL=http://[::1]:9000 "),
        ("file:///tmp/%00", "control characters"),
        ("file:///tmp/a%0Ab", "control characters"),
        (" s3://bucket/x", "spaces"),
        ("s3://bucket/x\n", "spaces"),
        (Path("s3://bucket/x"), "as a string"),
    ],
)
def test_a_malformed_url_is_refused_and_corrected(url: str | Path, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (open_store, Publisher):
        with pytest.raises(BadUrl) as raised:
            use(url)
        assert meant in raised.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_directory_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("./s3:/x", ".//s3:/x", str(tmp_path / "s3:" / "x"), tmp_path / "s3:" / "x"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "s3:" / "x"
    for name in ("s3/x", "s3-runs/x", "file.d/x", "s3", "memory (1)/x", "1.2.3.4/x", "runs/a//b", "hfx/y", "s3/.x/y"):
        store = open_store(name)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / name.replace("//", "/")


@pytest.mark.parametrize("opened", [open_store, Publisher, Subscriber])
@pytest.mark.parametrize("wrong", [None, 7, b"chain"])
def test_a_value_that_is_neither_a_url_nor_a_path_is_refused_in_words(
    opened: Any, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadUrl, match="is the variable set"):
        opened(wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_path_with_a_null_character_is_refused() -> None:
    with pytest.raises(BadUrl, match="null character"):
        LocalStore("a\0b")


@pytest.mark.parametrize("url", ["s3:/access:hunter2@bucket/x", "s3//access:hunter2@bucket", "s3a://access:hunter2@bucket"])
def test_credentials_in_a_malformed_url_are_not_repeated(url: str) -> None:
    with pytest.raises(BadUrl) as raised:
        open_store(url)
    assert "hunter2" not in str(raised.value)


def test_a_chain_never_begins_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "epoch").mkdir()
    (tmp_path / "epoch" / "notes").write_text("not ours, but named like it")
    with pytest.raises(LocationOccupied, match=r"model\.safetensors"):
        Publisher(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch", "model.safetensors"]
    memory = MemoryStore("occupied")
    memory.put("run-7/model.safetensors", b"weights")
    with pytest.raises(LocationOccupied):
        Publisher(memory)
    empty = tmp_path / "empty"
    (empty / "folder").mkdir(parents=True)
    (empty / ".hidden").write_text("")
    Publisher(empty).close()
    (empty / "added-later").write_text("")
    Publisher(empty).close()


def test_a_mirror_or_a_checkpoint_never_replaces_a_chain(tmp_path: Path) -> None:
    Publisher(tmp_path / "chain").close()
    with pytest.raises(CheckpointError, match="is a chain of versions"):
        pull(tmp_path / "other", tmp_path / "chain", replace=True)
    with pytest.raises(MirrorError, match="is a chain of versions"):
        Mirror(tmp_path / "chain").create("0" * 32)
    with pytest.raises(CheckpointError, match="is a URL"):
        pull(tmp_path / "chain", "s3://bucket/out")
    with pytest.raises(MirrorError, match="is a URL"):
        Mirror(Path("s3://bucket/mirror")).create("0" * 32)
    assert not is_chain_directory(tmp_path / "other")
    (tmp_path / "run.json").write_text("[" * 30_000)
    assert not is_chain_directory(tmp_path)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(BadUrl) as raised:
        open_store("s3://access:hunter2@bucket/prefix")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"retries": -1}, {"streams": 0}, {"multipart_bytes": 1024}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        StoreOptions(**wrong)  # type: ignore[arg-type]


def test_local_stores_do_not_import_the_client_library(tmp_path: Path) -> None:
    script = f"""
import sys
from deltawire.store import open_store, probe
for url in ({str(tmp_path)!r}, "memory://name"):
    probe(open_store(url))
assert "obstore" not in sys.modules
"""
    run_python(script)


def test_a_url_may_name_the_server_and_the_region_of_a_bucket() -> None:
    url = "s3://bucket/runs/seven?endpoint=http://127.0.0.1:1234&region=eu-west-1"
    with open_store(url) as store, open_store(store.url) as again:
        assert store.url == again.url == url
        assert default_run_name(store.url) == "seven"
    with pytest.raises(StoreError, match="plain http"):
        open_store("s3://bucket/run?endpoint=http://elsewhere")
