"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

BACKEND = "deltawire"
"""The name for `--weight-transfer-config '{"backend": "deltawire"}'`."""


def register() -> None:
    """Register the backend with vLLM, which imports it only in workers of a server that asks for it. It may be called twice.

    EngineCore learns to swap in one call, in every server: nothing changes for one that does not ask for the backend.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from . import engine_core, engine_holds

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    if engine_holds.install(EngineCore, EngineCoreProc):
        engine_core.install(EngineCore)
    WeightTransferEngineFactory.register_engine(BACKEND, "deltawire.engines.vllm.backend", "DeltaWireBackend")
    if current_platform.is_cpu():
        from .cpu import prepare_for_updates

        prepare_for_updates(BACKEND)
