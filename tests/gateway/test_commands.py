"""`deltawire serve` and `deltawire gateway` as processes: a request, its record, its feedback, and a rollback of the channel."""

from __future__ import annotations

import subprocess
from pathlib import Path

from forked_python import forked_run
from gateway_scene import Scene, stored_feedback, wait_until
from servers import serving_command
from tiny_policy import TinyPolicy

from deltawire.store import Store


def move(*arguments: object) -> None:
    assert forked_run("light", ["-m", "deltawire.cli", *map(str, arguments)], stdout=subprocess.PIPE).returncode == 0


def test_commands_answer_record_and_follow_a_channel(policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    chain = tmp_path / "store"
    second = policy.publish(1)
    move("promote", chain, "stable", "--version", 1)
    move("promote", chain, "stable", "--version", 2)
    with (
        serving_command("serve", "--from", chain, "--channel", "stable", "--port", 0, "--poll", 0.05) as engine,
        serving_command("gateway", "--from", chain, "--engine", f"stable={engine}", "--port", 0, "--journal", tmp_path / "journal") as url,
    ):
        scene = Scene(store, url, [])
        status, body, headers = scene.chat()
        assert (status, headers["x-deltawire-channel"], headers["x-deltawire-version"]) == (200, "stable", str(second.seq))
        status, _, _ = scene.post("/feedback", {"inference_id": body["id"], "metric_name": "thumbs", "value": True})
        assert status == 200
        move("rollback", chain, "stable")
        wait_until(lambda: scene.chat()[2]["x-deltawire-version"] == str(policy.first.seq), "the old version")
        scene.wait_for(headers["x-deltawire-inference-id"])
    (file,) = stored_feedback(store)
    assert [one.inference for one in file.feedback] == [headers["x-deltawire-inference-id"]]
    made = {span.seq for one in scene.interactions() for completion in one.rollouts.completions for span in completion.spans}
    assert made == {policy.first.seq, second.seq}
