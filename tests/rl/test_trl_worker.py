"""The worker from which TRL takes samples hands over exactly what TRL would train on. The tests do not use TRL's trainer."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learning_run import PATIENT, ROWS, attachments, members, model
from poisons import PoisonedStore, longer, prompts, reward, token
from tiny_models import torch

from deltawire import Publisher
from deltawire.events import Event
from deltawire.store.memory import MemoryStore
from deltawire.trainers import WeightSource

for library in ("trl", "vllm", "aiohttp"):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"the worker for TRL needs {library} to be installed", allow_module_level=True)

with warnings.catch_warnings():  # TRL warns that these imports may change, and about versions of vLLM
    warnings.simplefilter("ignore")
    from deltawire.trainers.trl_rollouts import FleetRolloutWorker

pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")


def test_the_worker_for_trl_refuses_poison_too():
    store = PoisonedStore([token(96), reward(1e39), longer(40_000, 0), prompts(lambda prompt: [*prompt, 1])])
    events: list[Event] = []
    with Publisher(store, attachments=attachments(), dtype=torch.bfloat16) as publisher:
        version = WeightSource(model()).publish(publisher, step=0)
        transfer: Any = SimpleNamespace(store=store, publisher=publisher, versions=[version])
        worker = FleetRolloutWorker(transfer, ROWS, groups=2, samples=2, max_tokens=6, options=PATIENT, on_event=events.append)
        worker.start()
        with members(store):
            samples = [worker.rollout_buffer.get(timeout=600) for _ in range(4)]
        worker.stop()
    reasons = [event.fields["reason"] for event in events if event.name == "rollout-rejected"]
    assert reasons == ["untrainable", "untrainable", "malformed", "malformed"]
    assert all(sample.input_ids.max() < 96 and np.isfinite(sample.advantage) for sample in samples)


def test_the_worker_for_trl_says_that_files_are_missing():
    store = MemoryStore()
    with Publisher(store, dtype=torch.bfloat16) as publisher:
        version = WeightSource(model()).publish(publisher, step=0)
        transfer: Any = SimpleNamespace(store=store, publisher=publisher, versions=[version])
        worker = FleetRolloutWorker(transfer, ROWS, groups=2, samples=2, max_tokens=6)
        worker.start()
        assert worker._thread is not None
        worker._thread.join()
        with pytest.raises(RuntimeError, match=r"no attachment config\.json\. Pass `attachments`"):
            worker.check_health(60.0)
