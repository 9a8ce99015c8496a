"""A vLLM plugin for tests. Updates fail half-way in the workers of the ranks that the file named by DELTAWIRE_TEST_FAULTS lists.

{"write": RANKS}          fails when half of an update from the mirror is written
{"load": RANKS}           fails to load everything
{"apply": RANKS}          fails when an update of live memory is written
{"killed-staging": RANKS} is killed while it decodes an update
{"killed-written": RANKS} is killed when an update of live memory is written, and not confirmed yet
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any


def register() -> None:
    path = os.environ.get("DELTAWIRE_TEST_FAULTS")
    if path is None:
        return
    from deltawire.engines.vllm import loading
    from deltawire.engines.vllm.live.layout_update import LayoutUpdate
    from deltawire.engines.vllm.mirror.element_map import MappedChanges

    if getattr(loading.load_all, "is_faulty", False):
        return
    write, load_all, apply, add = MappedChanges.write, loading.load_all, LayoutUpdate.apply, LayoutUpdate.add

    def fails(kind: str) -> bool:
        from vllm.distributed.parallel_state import get_world_group

        faults = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        return get_world_group().rank_in_group in faults.get(kind, [])

    def write_some(mapped: MappedChanges) -> None:
        if fails("write"):
            write(dataclasses.replace(mapped, scatters=mapped.scatters[: len(mapped.scatters) // 2]))
            raise RuntimeError("injected: half of the tensors are written")
        write(mapped)

    def load_nothing(model: Any, model_config: Any, weights: Any) -> None:
        if fails("load"):
            raise RuntimeError("injected: nothing can be loaded")
        load_all(model, model_config, weights)

    def add_or_die(update: LayoutUpdate, *arguments: Any) -> Any:
        found = add(update, *arguments)
        if fails("killed-staging"):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def apply_and_fail(update: LayoutUpdate) -> None:
        apply(update)
        if fails("killed-written"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fails("apply"):
            raise RuntimeError("injected: the update is written, but the worker fails")

    load_nothing.is_faulty = True  # type: ignore[attr-defined]
    LayoutUpdate.apply, LayoutUpdate.add = apply_and_fail, add_or_die  # type: ignore[method-assign]
    MappedChanges.write, loading.load_all = write_some, load_nothing  # type: ignore[method-assign]
