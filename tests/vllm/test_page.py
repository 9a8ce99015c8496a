"""The commands for vLLM in docs/serve.md and docs/fleet.md work as written, with a tiny model and a directory as the bucket."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_server import LiveServer, LiveSidecar, wait_until
from tiny_checkpoints import TinyModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from markdown_blocks import ROOT, blocks

if TYPE_CHECKING:
    from conftest import Run

PAGES = ("docs/serve.md", "docs/fleet.md")


def commands() -> dict[str, list[str]]:
    """Return for each page the command that starts a server, and the one that updates it."""
    found = {}
    for page in PAGES:
        (block,) = [block for block in blocks(ROOT / page) if block.run_by == "tests/vllm/test_page.py"]
        found[page] = block.text.splitlines()
    return found


@pytest.mark.slow
def test_a_server_and_a_sidecar_start_as_the_pages_say(
    start_run: Callable[..., Run], serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    by_page = commands()
    starts = [shlex.split(lines[0]) for lines in by_page.values()]
    for start in starts:
        assert start[:4] == ["VLLM_SERVER_DEV_MODE=1", "vllm", "serve", "MODEL"]
    flags = max((start[4:] for start in starts), key=len)  # the page about fleets has all flags of the other page, and one more
    assert {flag for start in starts for flag in start[4:]} == set(flags)
    at = flags.index("--weight-transfer-config")
    assert flags[at + 1] == '{"backend": "deltawire"}'  # `serve` gives this flag to every server

    run = start_run(TinyModel("dense"))
    version = run.publish()
    server = serve(run.checkpoint, arguments=[*flags[:at], *flags[at + 2 :]]).wait()
    words = shlex.split(by_page["docs/serve.md"][1])
    assert words == ["deltawire", "sidecar", "--engine", "http://127.0.0.1:8000", "--from", "s3://bucket/run"]
    sidecar = follow(server.url, run.store)
    wait_until(lambda: bool(sidecar.events("swapped")), "the first version")
    assert sidecar.events("swapped")[-1]["seq"] == version.seq
    assert re.fullmatch(r"deltawire member --from \S+ --env \S+ --engine vllm=http://127.0.0.1:8000", by_page["docs/fleet.md"][1])
