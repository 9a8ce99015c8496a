"""transformers models and any other `nn.Module`: weights change in place, between two forward passes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..subscribe.memory_replica import MemoryReplica
from ..subscribe.prepared_swap import Swap
from ..subscribe.replica import Replica
from ..tensors import torch_types
from ..tensors.checkpoint_layout import CheckpointLayout
from ..tensors.gpu_handover import synchronize_gpus
from ..tensors.module_tensors import NameMap
from .base import Engine, KvCache
from .swap.forward_lock import ForwardLock, LockedForward
from .weights.host_copy import HostCopyWeights
from .weights.in_place import InPlaceWeights
from .weights.live_tensors import LiveTensors
from .weights.module_weights import ModuleWeights

if TYPE_CHECKING:
    import torch


class ModuleEngine(Engine):
    """A module in this process, whose parameters and persistent buffers follow a chain.

    >>> model = AutoModelForCausalLM.from_pretrained(checkpoint)
    >>> HotSwap("s3://bucket/run", ModuleEngine(model)).sync()

    The module keeps its tensors: their values change in place, and tied tensors stay tied. Nothing else may train or cast the module. Its
    tensors must have the types that are published.

    If the weights are on the CPU, or on one GPU that the codec works on (docs/gpu.md), there is no second copy of them: deltas are decoded
    against the module's weights. Weights on other devices, on several devices, or of a tensor subclass have a copy on the host.

    Swaps wait until calls of the module (`module(...)`, and therefore `generate`) have ended, and calls wait for swaps. Code that reads the
    weights in another way, for example by calling a submodule, must do so within `forward_pass()`. With `KvCache.DROP`, swaps also wait
    until `generation()` contexts have ended.

    The chain has the tensors that the module's checkpoints have. For a transformers model these are the tensors that `save_pretrained`
    writes. Tensors that the model fuses when it loads them, such as the experts of a layer, are updated as views of the fused parameter.
    Parameters that the model splits off one checkpoint tensor are moved into one memory when the engine is made. `UnsupportedLayout` is
    raised for a model where neither is possible. The chain may also use the module's own names.

    Parameters
    ----------
    module
        The module to update.
    names
        Maps names in the module's checkpoints to names in the chain. A function may return None for tensors that the chain does not have.
    bundle
        The bundle to use, if a version has several.
    loaded_seq
        The `Version.seq` of the version that the module was loaded from, if it is known. Then the first sync needs no full checkpoint.
    keep_others
        True to allow tensors in the chain that the module does not have. They are kept in memory. If False, such a chain is refused.
    pause_timeout
        Seconds that a swap waits for forward passes to end. After that it fails, and the next sync tries again.
    threads
        Number of threads for decoding and digests. None means one per core.
    undo_bytes
        Most bytes, on the module's device, kept for going back to earlier versions without the store. None means a quarter of the weights
        on the CPU, and nothing on a GPU.
    name
        The name of the engine in messages and events.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        names: NameMap | None = None,
        bundle: str = "",
        loaded_seq: int | None = None,
        keep_others: bool = False,
        pause_timeout: float = 60.0,
        threads: int | None = None,
        undo_bytes: int | None = None,
        name: str = "module",
    ) -> None:
        self.name = name
        self._layout = CheckpointLayout(module, names, bundle=bundle, keeps_dequantised=True)
        self._layout.weights(in_place=True)
        self._pause_timeout = pause_timeout
        self._loaded_seq = loaded_seq
        self._keep_others = keep_others
        self._threads = threads
        self._undo_bytes = undo_bytes
        self._forward_lock = ForwardLock()
        self._forward = LockedForward(module, self._forward_lock)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the live weights by the names of the module's checkpoints. A tied tensor appears under each of its names."""
        return self._layout.weights(in_place=True)

    def replica(self, swap: Swap) -> Replica:
        tensors_now = list(self.weights().values())
        undo_bytes = self._undo_bytes
        if undo_bytes is None and any(torch_types.gpu_of(tensor) is not None for tensor in tensors_now):
            undo_bytes = 0
        tensors = LiveTensors(
            self.weights,
            (self._layout.own_weights,) if self._layout.accepts_own_names else (),
            loaded_seq=self._loaded_seq,
            keep_others=self._keep_others,
        )
        plain = (InPlaceWeights if _codec_reaches(tensors_now) else HostCopyWeights)(tensors, threads=self._threads)
        weights = ModuleWeights(tensors, plain, threads=self._threads)
        return MemoryReplica(weights, swap, threads=self._threads, undo_bytes=undo_bytes)

    def pause(self, kv_cache: KvCache) -> None:
        of_each_device = {str(tensor.device): tensor for tensor in self.weights().values()}
        self._forward_lock.acquire(kv_cache, self._pause_timeout)
        synchronize_gpus(of_each_device)  # a GPU may still work for calls that have returned, on any stream

    def resume(self) -> None:
        self._forward_lock.release()

    def forward_pass(self) -> contextlib.AbstractContextManager[None]:
        """Use this context for code that reads the weights without calling the module itself."""
        return self._forward_lock.forward_pass()

    def generation(self) -> contextlib.AbstractContextManager[None]:
        return self._forward_lock.generation()

    def close(self) -> None:
        """Let the module run without the engine, as before."""
        self._forward.remove()


def _codec_reaches(weights: list[torch.Tensor]) -> bool:
    """Return whether the codec can work on these weights directly: all are on the CPU, or all on one GPU that it has kernels for."""
    import torch

    from ..codec.gpu.device import has_kernels

    devices = {tensor.device for tensor in weights}
    has_codec = all(device.type == "cpu" or has_kernels(device) for device in devices)
    return (
        has_codec and len(devices) <= 1 and all(type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for tensor in weights)
    )
