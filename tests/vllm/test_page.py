"""The commands for vLLM in docs/serve.md and docs/fleet.md work as written, with a tiny model and a directory as the bucket."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from forked_python import ForkedPopen
from live_server import LiveServer, LiveSidecar, wait_until
from tiny_checkpoints import TinyModel

from deltawire import Publisher, Version
from deltawire.fleet import Coordinator, FleetOptions, StalenessBudget
from deltawire.format.records.trainer_records import Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from markdown_blocks import blocks_run_by

if TYPE_CHECKING:
    from conftest import Run

PAGES = ("docs/serve.md", "docs/fleet.md")


def commands() -> dict[str, list[str]]:
    """Return for each page the command that starts a server, and the one that updates it."""
    return {page: block_with("vllm serve", page).splitlines() for page in PAGES}


def block_with(text: str, page: str = "docs/serve.md") -> str:
    """Return the one block of a page that this file runs and that contains a text."""
    (block,) = [block for block in blocks_run_by("tests/vllm/test_page.py", page) if text in block.text]
    return block.text


def run_lines(lines: str, server: LiveServer, replaced: Mapping[str, str] = MappingProxyType({})) -> list[dict[str, Any]]:
    """Run the commands of a block against a server, and return what each prints. Commands after one that fails are not run."""
    text = lines.replace("http://127.0.0.1:8000", server.url)
    for written, meant in replaced.items():
        text = text.replace(written, meant)
    answers = []
    for line in text.splitlines():
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "NO_PROXY": "*"})
        if done.returncode:
            return [*answers, {"failed": done.stderr}]
        answers.append(json.loads(done.stdout or "{}"))
    return answers


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
    version = run.publish(step=0)
    server = serve(run.checkpoint, arguments=[*flags[:at], *flags[at + 2 :]], environment={"DELTAWIRE_UPDATE_SECONDS": "0.1"}).wait()
    words = shlex.split(by_page["docs/serve.md"][1])
    assert words == ["deltawire", "sidecar", "--engine", "http://127.0.0.1:8000", "--from", "s3://bucket/run"]
    sidecar = follow(server.url, run.store)
    wait_until(lambda: bool(sidecar.events("swapped")), "the first version")
    assert sidecar.events("swapped")[-1]["seq"] == version.seq
    (status,) = run_lines(block_with("deltawire_status"), server)
    assert [worker["seq"] for worker in status["results"]] == [version.seq]
    sidecar.kill()
    check_member(run, version, server, by_page["docs/fleet.md"][1])
    check_routes_of_a_trainer(run, server)


def check_member(run: Run, version: Version, server: LiveServer, command: str) -> None:
    """Run the command of a member until it has made the rollouts of one round with this server."""
    (run.folder / "my_task.py").write_text("def reward(prompts, completion_ids, **_):\n    return list(map(len, completion_ids))\n")
    for written, meant in {"s3://bucket/run-7": run.store, "http://127.0.0.1:8000": server.url}.items():
        assert written in command
        command = command.replace(written, meant)
    deltawire, *arguments = shlex.split(command)
    assert deltawire == "deltawire"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(run.folder), os.environ.get("PYTHONPATH", "")])}
    options = FleetOptions(poll_seconds=0.05)
    with (
        Coordinator(run.store, epoch=run.publisher.epoch, budget=StalenessBudget(0), options=options) as fleet,
        ForkedPopen("torch", ["-m", "deltawire.cli", *arguments], cwd=run.folder, env=environment) as member,
    ):
        fleet.open_round([[{"prompt": "w1 w2"}]], for_step=1, sampling=Sampling(samples=2, max_tokens=8))
        (rollouts,) = fleet.collect(1, timeout=300).rollouts
        assert set(rollouts.versions) == {version.seq}
        assert [one.rewards for one in rollouts.completions] == [(float(len(one.tokens)),) for one in rollouts.completions]
        fleet.stop()
        assert member.wait(300) == 0


def check_routes_of_a_trainer(run: Run, server: LiveServer) -> None:
    """Run the page's requests of a trainer, with a version, a fence, a location that does not exist, and a pause lease."""
    steps = block_with("init_weight_transfer_engine")

    def bring(seq: int, *, url: str = run.store) -> list[dict[str, Any]]:
        return run_lines(steps, server, {'"seq": 12': f'"seq": {seq}', '"12"': f'"{seq}"', "s3://bucket/run": url})

    version = run.publish()
    with Publisher(run.store, attachments={"config.json": run.checkpoint / "config.json"}) as next_publisher:
        last = next_publisher.publish(run.state)
    assert isinstance(last, Version)
    assert last.seq == version.seq + 2  # the commit between them is a fence
    assert len(bring(version.seq)) == len(steps.splitlines())
    assert server.routes.weight_version() == str(version.seq)

    missing = bring(last.seq, url=f"{run.store}-missing")
    assert [sorted(answer) for answer in missing[:3]] == [["message"], ["status"], ["message"]]  # also for a wrong url
    assert "failed" in missing[3]
    wait_until(lambda: server.routes.status()[0]["unended_update"] is not None, "a server that says why it stays paused")
    (worker,) = server.routes.status()
    assert f"those of version {version.seq}, and POST /resume" in worker["unended_update"]
    assert worker["paused_by_others"]
    assert "failed" in bring(version.seq + 1)[-1]
    assert [(worker["seq"], worker["quarantined"]) for worker in server.routes.status()] == [(version.seq, False)]
    assert len(bring(last.seq)) == len(steps.splitlines())  # it begins again after a failed update
    assert not server.routes.is_paused()
    (worker,) = server.routes.status()
    assert (worker["seq"], worker["unended_update"]) == (last.seq, None)
    assert run_lines(block_with("deltawire_lease"), server) == [{"results": []}]
    server.routes.pause("keep", clear_cache=False)
    (worker,) = server.routes.status()
    assert (worker["paused"], worker["paused_by_others"]) == (True, False)
