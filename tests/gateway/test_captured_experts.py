"""Experts that an engine recorded for an answer are in the rollouts that the gateway stores."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
from gateway_scene import gateway, serving
from scripted_engine import ScriptedEngine
from tiny_models import moe, save_tokenizer

from deltawire import Publisher
from deltawire.store import Store
from deltawire.trainers import WeightSource


def test_routed_experts_of_an_answer_are_stored_with_it(store: Store, tmp_path: Path) -> None:
    model, files = moe(), save_tokenizer(tmp_path / "files")
    model.config.save_pretrained(files)
    with Publisher(store, attachments=files) as publisher:
        version = WeightSource(model).publish(publisher, step=0)
    shape = (6, model.config.num_hidden_layers, 2)  # two tokens of the prompt, and four of the answer
    first = np.arange(np.prod(shape[:2]), dtype="<i2").reshape(shape[:2]) % 4
    experts = np.stack([first, (first + 1 + first % 3) % 4], axis=2)
    engine = ScriptedEngine(str(version.seq))
    engine.experts = {"shape": list(shape), "data": base64.b64encode(experts.astype("<i2").tobytes()).decode()}
    with serving(engine.serve) as url, gateway(store, tmp_path, url) as scene:
        scene.wait_for(scene.chat()[2]["x-deltawire-inference-id"])
        (file,) = scene.interactions()
    assert file.rollouts.routing is not None
    assert file.rollouts.routing.layout.experts == 4
    found = file.rollouts.routing.of_completion(0)
    assert np.array_equal(found, np.sort(experts, axis=2))  # a file has the experts of a token in rising order
