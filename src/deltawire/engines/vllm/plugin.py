"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

BACKEND = "deltawire"
"""What `--weight-transfer-config '{"backend": "deltawire"}'` names."""


def register() -> None:
    """Make the backend known to vLLM. It is imported only in workers of a server that asks for it. Doing so twice is fine."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "deltawire.engines.vllm.backend", "DeltaWireBackend")
    if current_platform.is_cpu():
        from .cpu import prepare_for_updates

        prepare_for_updates(BACKEND)
