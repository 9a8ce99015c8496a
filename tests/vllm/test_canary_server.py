"""A real server whose results are wrong after an update is quarantined, by the sidecar's canary or by itself."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, wait_until
from tiny_checkpoints import TinyModel, runtime_hashes
from typer.testing import CliRunner

from deltawire import SigningKey
from deltawire.cli import app
from deltawire.engines.vllm import QUARANTINED_LABEL
from deltawire.engines.vllm.driver.sidecar import Sidecar
from deltawire.errors import DecodingDiffers, EngineQuarantined
from deltawire.events import Event

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from markdown_blocks import blocks_run_by

pytestmark = pytest.mark.slow


def test_a_server_with_wrong_results_is_quarantined(start_run: Callable[[TinyModel], Any], serve: Callable[..., LiveServer]) -> None:
    run = start_run(TinyModel("dense"))
    run.publish(changed=False)
    faults = run.folder / "faults.json"
    server = serve(run.checkpoint, environment={"DELTAWIRE_TEST_FAULTS": str(faults)}).wait()
    events: list[Event] = []

    def start(canary: Any) -> Sidecar:
        spool = run.folder / "spool"
        return Sidecar(server.url, run.store, None, spool=spool, confirm="written", canary=canary, on_event=events.append)

    def passed() -> list[Any]:
        return [event.fields["canary"] for event in events if event.name == "canary-passed"]

    sidecar = start("recorded")
    for _ in range(2):
        version = run.publish()
        sidecar.step()
    assert passed() == ["self", "self"]
    SigningKey.generate().save(run.folder / "trainer.key")
    (block,) = blocks_run_by("tests/vllm/test_canary_server.py", "docs/serve.md")
    places = {"s3://bucket/run-7": run.store, "http://127.0.0.1:8000": server.url, "trainer.key": str(run.folder / "trainer.key")}
    words = [places.get(word, word) for word in shlex.split(block.text)]
    assert words[0] == "deltawire"
    done = CliRunner().invoke(app, [*words[1:], "--json"])
    assert json.loads(done.stdout) == {
        "version": version.updates,
        "seq": version.seq,
        "tokens": 32,
        "signed": True,
        "recorded_before": False,
    }, done.output
    sidecar.step()
    assert passed() == ["self", "self", "recorded"]

    # Decoding reads other weights than prompts, even after the version was loaded anew.
    faults.write_text(json.dumps({"stale": [0]}))
    run.publish()
    with pytest.raises(EngineQuarantined):
        sidecar.step()
    assert server.routes.is_paused()
    with pytest.raises(DecodingDiffers):
        sidecar.step()
    with pytest.raises(DecodingDiffers, match="even after it was loaded anew"):
        sidecar.step()
    assert server.routes.is_paused()
    (worker,) = server.routes.status()
    assert (worker["quarantined"], server.routes.weight_version()) == (True, QUARANTINED_LABEL)
    assert "log-probs of decoding and of prompts differ" in worker["held"]
    faults.unlink()
    version = run.publish()
    sidecar.step()
    assert (server.routes.weight_version(), server.routes.is_paused()) == (str(version.seq), False)
    assert passed()[3:] == ["self"]
    sidecar.close()

    # The worker finds wrong weights after a swap. The server ends its requests and stays paused, although nobody looks.
    sidecar = start("off")
    faults.write_text(json.dumps({"late": [0]}))
    streaming = threading.Thread(target=server.stream, args=(450,))
    streaming.start()
    wait_until(lambda: not server.routes.is_paused(), "an answer")
    version = run.publish()
    assert sidecar.step() is not None
    wait_until(lambda: server.routes.weight_version() == QUARANTINED_LABEL, "a server that notices it")
    assert server.routes.is_paused()
    streaming.join(300)
    assert not streaming.is_alive()
    faults.unlink()
    sidecar.step()
    assert (server.routes.weight_version(), server.routes.is_paused()) == (str(version.seq), False)
    assert server.routes.checksums() == runtime_hashes(run.state, 1)
    assert len(server.generate()) == 24
    sidecar.close()
