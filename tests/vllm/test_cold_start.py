"""A model of vLLM takes a full checkpoint from the store, shard by shard. Then all memory is that of a fresh load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_models import import_vllm, load_model
from model_memory import addresses, difference, memory
from tiny_checkpoints import TinyModel, train

import deltawire
from deltawire import Publisher
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.routes.remaining_routes import Routes
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import open_store
from deltawire.subscribe.spool.delta_spool import DeltaSpool
from deltawire.subscribe.sync_context import SyncContext
from deltawire.subscribe.tensor_table import read_tensor_table

pytestmark = pytest.mark.slow


def test_a_checkpoint_that_streams_from_the_store_gives_the_memory_of_a_fresh_load(tmp_path: Path) -> None:
    import_vllm()
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    from deltawire.engines.vllm.loading import load_tensors, module_order, stream_anchor

    tiny = TinyModel("moe", experts=4, layers=3)
    state = tiny.state()
    start = tiny.save(tmp_path / "start", state)
    train(state, np.random.default_rng(7))
    attachments = {path.name: path for path in start.iterdir() if path.suffix == ".json"}
    with Publisher(
        str(tmp_path / "store"), attachments=attachments, options=WriterOptions(shard_bytes=1 << 14, segment_bytes=1 << 12)
    ) as publisher:
        publisher.publish(state)
    log = ReaderOptions().open_log(open_store(str(tmp_path / "store")))
    context = SyncContext(log, Routes(log))
    head = log.head()
    assert head is not None
    anchor = context.routes.find(None, head)[0]
    order = module_order(read_tensor_table(context, anchor))
    assert len([entry for entry in anchor.files if str(entry.name).endswith(".safetensors")]) > 2

    live = load_model(start)
    before, places = memory(live.model), addresses(live.model)
    waiting: list[int] = []

    def watched() -> Iterator[tuple[str, Any]]:
        for tensor in stream_anchor(anchor, context, order, spool=DeltaSpool(tmp_path / "spool")):
            waiting.append(sum(bool(LAYERWISE_INFO[module].loaded_weights) for module in live.model.modules() if module in LAYERWISE_INFO))
            yield tensor

    with live.active():
        load_tensors(live.model, live.vllm_config.model_config, watched())
    deltawire.pull(str(tmp_path / "store"), tmp_path / "pulled", options=ReaderOptions(pin=False))
    fresh = load_model(tmp_path / "pulled")
    assert difference(memory(live.model), memory(fresh.model)) == []
    assert difference(memory(live.model), before)
    moved = {name for name, place in addresses(live.model).items() if places[name] != place}
    assert all(name.endswith("_scale_cpu") for name in moved), "kernels would read old memory"  # vLLM makes these scalars anew
    assert max(waiting) <= 3, "vLLM collects the tensors of many modules"
