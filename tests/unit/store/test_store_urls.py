"""URLs name stores, or are refused without being repeated where they hold secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_python

from deltawire.errors import BadUrl
from deltawire.store import StoreOptions, open_store
from deltawire.store.local import LocalStore


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
        "s3://bucket?endpoint=http://elsewhere",
        "hf://models/owner/name",
        "hf://buckets/owner",
        "memory://",
        "file://host/path",
        "file://relative",
    ],
)
def test_what_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(BadUrl):
        open_store(url)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(BadUrl) as raised:
        open_store("s3://access:hunter2@bucket/prefix")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"retries": -1}, {"streams": 0}, {"part_bytes": 1024}])
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
