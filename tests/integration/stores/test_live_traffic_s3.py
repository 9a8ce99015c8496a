"""Interactions and feedback go through a real S3 server, and another gateway finds them there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")
sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("fleet", "gateway")]

from gateway_scene import gateway, serving, stored_feedback
from scripted_engine import ScriptedEngine
from servers import Server
from tiny_policy import TinyPolicy


def test_interactions_and_feedback_are_stored_over_s3(seaweedfs: Server, tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, seaweedfs.environment), seaweedfs.open() as store:
        policy = TinyPolicy(tmp_path, store)
        engine = ScriptedEngine(str(policy.publish(0).seq))
        policy.publisher.close()
        with serving(engine.serve) as url:
            with gateway(store, tmp_path / "first", url) as scene:
                name = scene.chat()[2]["x-deltawire-inference-id"]
                scene.wait_for(name)
                assert scene.post("/feedback", {"inference_id": name, "metric_name": "thumbs", "value": True})[0] == 200
            with gateway(store, tmp_path / "second", url) as scene:  # it learns from the store which interactions there are
                status, answer, _ = scene.post("/feedback", {"inference_id": name, "metric_name": "thumbs", "value": False, "revision": 1})
                assert status == 200, answer
        (file,) = scene.interactions()
        assert [one.tokens.tolist() for one in file.rollouts.completions] == [[5, 6, 7, 8]]
        found = [one for each in stored_feedback(store) for one in each.feedback]
        assert sorted((one.inference, one.revision, one.value) for one in found) == [(name, 0, True), (name, 1, False)]
