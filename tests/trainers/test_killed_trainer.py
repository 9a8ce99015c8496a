"""A trainer process is killed at several moments. After a restart it continues by itself, and its followers end with exact weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import killable_trainer
import pytest
from forked_python import forked_run
from tiny_models import bits, qwen

from deltawire import state_digest
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.verify import verify
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.store import open_store
from deltawire.store.memory import MemoryStore
from deltawire.testing import FaultyStore

STEPS = 8


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    qwen(0).config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_trainer_that_is_killed_at_any_moment_continues_by_itself_and_its_follower_is_exact(tmp_path: Path, model_dir: Path) -> None:
    digests: dict[int, Any] = {}
    last: dict[str, Any] = {}

    def note(step: int, weights: Any) -> None:
        digests[step] = state_digest(weights)
        last.clear()
        last.update({name: tensor.clone() for name, tensor in weights.items()})

    whole = FaultyStore(MemoryStore())
    killable_trainer.train(model_dir, whole, tmp_path / "undisturbed", STEPS, note)
    calls = len(whole.calls)
    moments = [3, calls // 4, calls // 2, 9]  # while it takes over, in the middle, later, and while it takes over from a killed trainer

    url = str(tmp_path / "store")
    command = [killable_trainer.__file__, str(model_dir), url, str(tmp_path / "checkpoints"), str(STEPS)]
    killed = [forked_run("torch", [*command, moment]).returncode for moment in moments[:2]]
    served = qwen(5)
    with open_store(url) as store, HotSwap(store, ModuleEngine(served)) as policy:
        policy.start(poll=0.02)
        killed += [forked_run("torch", [*command, moment]).returncode for moment in moments[2:]]
        assert killed == [-signal.SIGKILL] * len(moments)
        assert forked_run("torch", command).returncode == 0
        newest = ChainLog(store).head()
        assert newest is not None
        policy.wait_for(seq=newest.seq, timeout=120)
        assert newest.step == STEPS
        published = {name: tensor for name, tensor in served.state_dict().items() if name in last}
        assert bits(published) == bits(last)
        assert verify(store, deep=True).problems == []
        versions = [commit for commit in ChainLog(store).tail(-1) if commit.kind != "fence"]
        assert len(versions) > STEPS + 1  # some steps were trained again, from an older checkpoint
        assert all(commit.digest == digests[commit.step] for commit in versions if commit.step is not None)
