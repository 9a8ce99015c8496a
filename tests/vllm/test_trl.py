"""TRL's AsyncGRPO, a real vLLM server, and our transfer between them, with the trainer of examples/trl_vllm_over_bucket."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_example import EXAMPLES, run_example
from forked_python import ForkedPopen, forked_run
from live_server import LiveServer, LiveSidecar, wait_until
from servers import Server
from tiny_checkpoints import runtime_hashes

from deltawire import Subscriber

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
]

EXAMPLE = EXAMPLES / "trl_vllm_over_bucket"
STEPS = 6
"""The number of steps after the checkpoint from which the second trainer starts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "model"
    assert forked_run("trl", [EXAMPLE / "tiny_model.py", folder]).returncode == 0
    return folder


def trained(arguments: list[Any]) -> list[dict[str, Any]]:
    """Run the example's trainer to its end, and return the JSON that it printed."""
    done = forked_run("trl", [EXAMPLE / "train.py", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def test_the_example_is_served_every_version_over_a_bucket(seaweedfs: Server) -> None:
    """Trainer, sidecar and server are processes that share only a bucket. The server is started as a user would start it."""
    printed = run_example("trl", EXAMPLE / "run.py", 3, seaweedfs.fresh_url(), environment=seaweedfs.environment).splitlines()
    lines = [json.loads(line) for line in printed if line.startswith('{"')]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3]
    assert [line["ratio"] for line in lines if "ratio" in line] == pytest.approx([1.0] * 3, abs=0.05)
    (published,) = [line["published"] for line in lines if "published" in line]
    swapped = [line.split("  ")[0] for line in printed if line.startswith("version ")]
    assert swapped == [f"version {seq}" for seq in published]
    assert len(published) == 4


def test_a_server_has_exact_weights_after_its_trainer_resumed_from_a_checkpoint(
    tmp_path: Path, model: Path, serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar]
) -> None:
    store = str(tmp_path / "store")
    server = serve(model, arguments=["--served-model-name", str(model), "tiny", "--enable-scale-out"]).wait()
    sidecar = follow(server.url, store, "--confirm", "everything")
    checkpoints = tmp_path / "checkpoints"
    with (tmp_path / "killed.log").open("wb") as log:
        killed = ForkedPopen(
            "trl", [EXAMPLE / "train.py", model, store, server.url, 1000, checkpoints], stdout=log, stderr=log, start_new_session=True
        )
    try:  # checkpoints are made after even steps, so there is one
        wait_until(lambda: bool(sidecar.events("swapped")) and sidecar.events("swapped")[-1]["step"] >= 3, "three steps", 600)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    before = sidecar.events("swapped")[-1]["seq"]
    assert server.generate()  # the server still serves

    for path in checkpoints.glob("checkpoint-*"):
        if not (path / "trainer_state.json").exists():  # this file is written last, so the kill left the checkpoint incomplete
            shutil.rmtree(path)
    newest = max(int(path.name.removeprefix("checkpoint-")) for path in checkpoints.glob("checkpoint-*"))
    lines = trained([model, store, server.url, newest + STEPS, checkpoints])
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == list(range(newest + 1, newest + STEPS + 1))  # the trainer resumed from the checkpoint
    assert [line["ratio"] for line in lines if "ratio" in line] == pytest.approx([1.0] * len(steps), abs=0.05)
    (published,) = [line["published"] for line in lines if "published" in line]
    assert len(published) == len(steps) + 1  # one version is published before the first step
    assert published[0] > before
    (samples,) = [line["samples by the versions that made them"] for line in lines if len(line) == 1 and "published" not in line]
    made_by = [[int(seq) for seq in versions.split()] for versions in samples]
    for versions in made_by:  # each sample was made by one version, or by several that were live one after the other
        first = published.index(versions[0])
        assert versions == published[first : first + len(versions)]
    # the sidecar read each version back in full
    assert [swap["seq"] for swap in sidecar.events("swapped") if swap["seq"] >= published[0]] == published
    assert not sidecar.events("engine-quarantined")
    with Subscriber(store) as reader:
        reader.sync()
        assert server.routes.checksums() == runtime_hashes(dict(reader.state), 1)
