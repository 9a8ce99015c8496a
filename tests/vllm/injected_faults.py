"""A vLLM plugin for tests: updates fail half-way in the workers of the ranks that the file named by DELTAWIRE_TEST_FAULTS lists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    path = os.environ.get("DELTAWIRE_TEST_FAULTS")
    if path is None:
        return
    from deltawire.engines.vllm import loading

    if getattr(loading.write_elements, "is_faulty", False):
        return
    write_elements, load_all = loading.write_elements, loading.load_all

    def fails(kind: str) -> bool:
        from vllm.distributed.parallel_state import get_world_group

        faults = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        return get_world_group().rank_in_group in faults.get(kind, [])

    def write_some_elements(model: Any, weights: Any, changes: Any, device: Any) -> None:
        if fails("write"):
            write_elements(model, weights, changes[: len(changes) // 2], device)
            raise RuntimeError("injected: half of the tensors are written")
        write_elements(model, weights, changes, device)

    def load_nothing(model: Any, model_config: Any, weights: Any) -> None:
        if fails("load"):
            raise RuntimeError("injected: nothing can be loaded")
        load_all(model, model_config, weights)

    write_some_elements.is_faulty = True  # type: ignore[attr-defined]
    loading.write_elements, loading.load_all = write_some_elements, load_nothing
