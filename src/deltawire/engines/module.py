"""transformers models, and any other `nn.Module`: new weights in place, between two forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..subscribe.memory_replica import MemoryReplica
from ..subscribe.prepared_swap import Swap
from ..subscribe.replica import Replica
from ..tensors import torch_types
from ..tensors.checkpoint_layout import CheckpointLayout
from ..tensors.gpu_handover import synchronize_gpus
from ..tensors.module_tensors import NameMap
from .base import Engine, KvCache
from .swap.forward_gate import ForwardGate
from .weights.host_copy import HostCopyWeights
from .weights.in_place import InPlaceWeights

if TYPE_CHECKING:
    import torch


class ModuleEngine(Engine):
    """A module whose parameters and persistent buffers follow a chain. They stay the same tensors, tied ones stay tied.

    >>> model = AutoModelForCausalLM.from_pretrained(checkpoint)
    >>> HotSwap("s3://bucket/run", ModuleEngine(model)).sync()

    On the CPU or one GPU that the codec works on (docs/gpu.md), the module's weights are the only copy there is: deltas are decoded against
    them. Weights elsewhere, on several devices, or of a tensor subclass have a copy on the host. Nothing may train or cast the module; what
    it has must be what is published, type for type.

    Swaps wait for calls of the module (`module(...)`, and so `generate`) to end, and calls wait for swaps. Whatever else reads the weights,
    such as a submodule that is called directly, belongs into `forward_pass()`. With `KvCache.DROP`, swaps also wait for what runs inside
    `generation()`; they give up after `pause_timeout` seconds, and the next sync tries again.

    The chain holds the tensors that the module's checkpoints hold. For a transformers model these are what `save_pretrained` writes:
    tensors that the model fuses when it loads them (the experts of a layer, for example) are updated as views of the fused parameter.
    Parameters that it splits off one checkpoint tensor get one memory, here and now. `UnsupportedLayout` is raised for a model where
    neither is possible. A chain of the module's own names is followed too.

    `names` maps the checkpoint's names to those of the chain, `bundle` is the one to take where a version has several. `at` is the version
    that the module was loaded from, which saves a whole download. `keep_others` allows, and keeps in memory, tensors that the module does
    not have. `undo_bytes` bounds the memory, on the module's device, for going back to earlier versions without the store; None means a
    quarter of the weights, and nothing for weights on a GPU.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        names: NameMap | None = None,
        bundle: str = "",
        at: int | None = None,
        keep_others: bool = False,
        pause_timeout: float = 60.0,
        threads: int | None = None,
        undo_bytes: int | None = None,
        name: str = "module",
    ) -> None:
        self.name = name
        self._layout = CheckpointLayout(module, names, bundle=bundle)
        self._layout.weights(in_place=True)
        self._pause_timeout = pause_timeout
        self._at = at
        self._keep_others = keep_others
        self._threads = threads
        self._undo_bytes = undo_bytes
        self._gate = ForwardGate()
        self._hooks = [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the live weights by the names of the module's checkpoints. A tied tensor appears under each of its names."""
        return self._layout.weights(in_place=True)

    def replica(self, swap: Swap) -> Replica:
        tensors_now = list(self.weights().values())
        undo_bytes = self._undo_bytes
        if undo_bytes is None and any(torch_types.gpu_of(tensor) is not None for tensor in tensors_now):
            undo_bytes = 0
        weights = (InPlaceWeights if _codec_reaches(tensors_now) else HostCopyWeights)(
            self.weights,
            at=self._at,
            keep_others=self._keep_others,
            threads=self._threads,
            other_namings=(self._layout.own_weights,) if self._layout.accepts_own_names else (),
        )
        return MemoryReplica(weights, swap, threads=self._threads, undo_bytes=undo_bytes)

    def pause(self, kv_cache: KvCache) -> None:
        of_each_device = {str(tensor.device): tensor for tensor in self.weights().values()}
        self._gate.close(kv_cache, self._pause_timeout)
        synchronize_gpus(of_each_device)  # calls that have returned may still run on a GPU, on any stream

    def resume(self) -> None:
        self._gate.open()

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around anything that reads the weights without calling the module itself."""
        self._gate.enter()
        try:
            yield
        finally:
            self._gate.leave()

    def generation(self) -> contextlib.AbstractContextManager[None]:
        return self._gate.generation()

    def close(self) -> None:
        """Take the hooks off the module."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *_: object) -> None:
        self._gate.enter()

    def _leave(self, *_: object) -> None:
        self._gate.leave()


def _codec_reaches(weights: list[torch.Tensor]) -> bool:
    """Whether the codec can work on them where they are: all on the CPU, or all on one GPU that it has kernels for."""
    import torch

    from ..codec.gpu.device import has_kernels

    devices = {tensor.device for tensor in weights}
    works = all(device.type == "cpu" or has_kernels(device) for device in devices)
    return works and len(devices) <= 1 and all(type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for tensor in weights)
