"""`deltawire doctor` with real S3 servers: sound ones, one that overwrites, and credentials that may only read or are wrong."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import KEY, Server

from deltawire import Publisher
from deltawire.chain.reader_options import ReaderOptions
from deltawire.cli.doctor.examine import examine
from deltawire.store import keys

sys.path.append(str(Path(__file__).parents[1]))

from forked_cli import run_forked
from test_cli import environment


@pytest.fixture
def chain(seaweedfs: Server) -> str:
    """Return the URL of a chain with two versions."""
    url = seaweedfs.fresh_url()
    with seaweedfs.open(url) as store, Publisher(store, attachments={"config.json": b"{}"}) as publisher:
        for step in range(2):
            publisher.publish({"w": np.full(5000, step, np.float16)}, step=step)
    return url


def doctor(server: Server, url: str, *options: str, **variables: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run the command, and return its exit code, and the worst level and text of each check. On a busy machine the link may be slow."""
    done = run_forked(["doctor", url, "--test-bytes", "100000", "--json", *options], environment() | dict(server.environment) | variables)
    answer: dict[str, Any] = json.loads(done.stdout)
    order = ("ok", "note", "warning", "wrong")
    found: dict[str, tuple[str, str]] = {}
    for each in sorted(answer["findings"], key=lambda each: order.index(each["level"])):
        found[each["check"]] = each["level"], f"{each['what']} | {each['remedy']}"
    assert answer["ok"] == (done.returncode == 0)
    return done.returncode, found


def test_a_run_in_a_real_store_is_well(seaweedfs: Server, chain: str) -> None:
    code, found = doctor(seaweedfs, chain)
    assert (code, {level for check, (level, _) in found.items() if check != "link"} <= {"ok", "note"}) == (0, True), found
    assert "reading, listing, writing and deleting work" in found["access"][1]
    with seaweedfs.open(chain) as store:
        assert not list(store.list(keys.PROBES))


def test_a_user_who_may_only_read_is_told_so_and_the_rest_is_checked(seaweedfs: Server, chain: str) -> None:
    code, found = doctor(seaweedfs, chain, AWS_ACCESS_KEY_ID=f"{KEY}reader")
    assert code == 0, found
    assert found["access"][0] == "warning"
    assert "--no-pin" in found["access"][1]
    assert {found[check][0] for check in ("chain", "data")} == {"ok"}
    code, found = doctor(seaweedfs, chain, "--read-only", AWS_ACCESS_KEY_ID=f"{KEY}reader")
    assert (code, found["access"][0]) == (0, "ok")


def test_wrong_credentials_and_a_missing_bucket_are_named(seaweedfs: Server, chain: str) -> None:
    code, found = doctor(seaweedfs, chain, AWS_SECRET_ACCESS_KEY="wrong")
    assert (code, found["access"][0]) == (1, "wrong")
    assert "credentials" in found["access"][1]
    assert "chain" not in found  # nothing can be said about it
    code, found = doctor(seaweedfs, "s3://no-such-bucket/run")
    assert (code, found["access"][0]) == (1, "wrong")


def test_a_server_that_ignores_the_condition_is_wrong(rclone: Server) -> None:
    code, found = doctor(rclone, rclone.fresh_url())
    assert code == 1
    assert found["create if absent"][0] == "wrong"
    assert found["chain"][0] == "wrong"


def test_a_skewed_clock_is_measured_with_a_real_server(seaweedfs: Server, chain: str) -> None:
    with seaweedfs.open(chain) as store:
        for ahead in (7200.0, -7200.0):
            found = examine(store, chain, options=ReaderOptions(), test_bytes=0, clock=lambda ahead=ahead: time.time() + ahead)
            assert abs(found.measured["clock_offset_seconds"] + ahead) < 600
            assert [each.check for each in found.findings if each.level == "wrong"] == ["clock"]
