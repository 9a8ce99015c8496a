"""Replay in a model that FSDP2 shards over real ranks (gloo)."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from servers import free_port
from support import PACKAGE

pytest.importorskip("torch.distributed.fsdp", reason="needs torch with FSDP2")
pytest.importorskip("transformers", reason="transformers is not installed")

HERE = Path(__file__).resolve().parent
LONGEST = 240


def test_sharded_ranks_replay_their_own_rows_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), str(HERE), str(HERE.parent)]))
    monkeypatch.syspath_prepend(str(HERE))
    import replay_worker

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "replay_worker"])
    port = free_port()
    ranks = [context.Process(target=replay_worker.run, args=(rank, 2, port, str(tmp_path))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LONGEST)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0], [path.read_text() for path in tmp_path.glob("error-*.txt")]
