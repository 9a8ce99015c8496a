"""Work that a worker does at its start, so that requests need not wait for it later."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

torch = pytest.importorskip("torch", reason="torch is not installed")

from deltawire.engines.vllm import worker_model  # noqa: E402
from deltawire.engines.vllm.worker_model import WorkerModel  # noqa: E402
from deltawire.errors import CodecUnavailable  # noqa: E402


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_for_all_types_of_a_checkpoint_are_compiled_at_the_start(tmp_path: Path, monkeypatch: Any, fails: bool) -> None:
    tensors = {"a": np.zeros(4, ml_dtypes.bfloat16), "b.weight_packed": np.zeros(4, np.int32), "c": np.zeros(4, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    compiled: list[int] = []

    def compile_kernels(device: torch.device, widths: Any) -> None:
        compiled.extend(sorted(widths))
        if fails:
            raise CodecUnavailable("there is no compiler.")

    monkeypatch.setattr(worker_model, "compile_kernels", compile_kernels)
    model = torch.nn.Linear(2, 2)
    worker = WorkerModel(model, SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path))))
    learnt: list[list[str]] = []
    monkeypatch.setattr(worker, "learn_layout", lambda table: learnt.append(list(table)))
    worker.learn_early()
    assert compiled == [4, 16, 32]
    assert learnt == [["a", "b.weight_packed", "c"]]
