"""The weights of a module in training, as they are published: renamed, filtered and cast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..chain.version import Version
from ..tensors.checkpoint_layout import CheckpointLayout
from ..tensors.module_tensors import NameMap, tied_names

if TYPE_CHECKING:
    import torch

    from .background import PendingVersion
    from .publisher import Publisher


class WeightSource:
    """Reads a module's parameters and persistent buffers, by the names that they have in its checkpoints.

    For a transformers model these are the tensors that `save_pretrained` writes, even if the live model has fused some of them.

    >>> source = WeightSource(model, names=lambda name: name.removeprefix("policy."))
    >>> with Publisher("s3://bucket/run", dtype=torch.bfloat16, background=True) as publisher:
    ...     source.publish(publisher, step=step)  # after optimizer.step()

    You need it only for `names`, `keep`, `tied` and `bundle`. Otherwise pass the model to `Publisher.publish`.

    Parameters
    ----------
    module
        The module.
    dtype
        Casts floating-point weights in `snapshot`, for uses other than publishing, such as a digest. A publisher casts by its own `dtype`.
        Cast tensors are copied to buffers on the host, which every snapshot reuses. Other tensors are not copied if they are on the CPU or
        on a GPU that the codec supports (docs/gpu.md).
    names
        Maps the names of the checkpoint to the published names, or to None for tensors that are not published.
    keep
        Tells for each published name whether the tensor is published.
    tied
        Publish tied weights under all of their names. By default they are published once, under their first name.
    bundle
        The name of the bundle that the weights belong to. It becomes a prefix of their names.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        dtype: torch.dtype | Callable[[str, torch.Tensor], torch.dtype | None] | None = None,
        names: NameMap | None = None,
        keep: Callable[[str], bool] = lambda name: True,
        tied: bool = False,
        bundle: str = "",
    ) -> None:
        self._dtype = dtype
        self._keep = keep
        self._tied = tied
        self._layout = CheckpointLayout(module, names, bundle=bundle)
        self._buffers: dict[str, torch.Tensor] = {}

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Return the weights as they are now, by their published names. They are valid until the next training step or snapshot."""
        import torch

        from ..codec.gpu.device import has_kernels

        weights = self._layout.weights()
        dropped = {} if self._tied else tied_names(weights)
        state: dict[str, torch.Tensor] = {}
        is_copying = False
        with torch.no_grad():
            for name, tensor in weights.items():
                if name in dropped or not self._keep(name):
                    continue
                tensor = tensor.detach()
                dtype = self._wire_dtype(name, tensor)
                if dtype == tensor.dtype and (tensor.device.type == "cpu" or has_kernels(tensor.device)):
                    state[name] = tensor
                    continue
                buffer = self._buffer(name, tensor, dtype)
                on_cpu = tensor.device.type == "cpu"
                buffer.copy_(tensor if on_cpu else tensor.to(dtype), non_blocking=not on_cpu)
                is_copying |= not on_cpu
                state[name] = buffer
        if is_copying:
            torch.accelerator.synchronize()
        return state

    def publish(self, publisher: Publisher, *, step: int | None = None, meta: Mapping[str, str] | None = None) -> Version | PendingVersion:
        """Publish the weights as they are now. With a background publisher, training may continue as soon as this returns.

        Parameters
        ----------
        publisher
            The publisher.
        step
            The trainer's step. It is recorded with the version.
        meta
            Further strings that are recorded with the version.
        """
        return publisher.publish(self.snapshot(), step=step, meta=meta)

    def _wire_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point() or self._dtype is None:
            return tensor.dtype
        if callable(self._dtype):
            return self._dtype(name, tensor) or tensor.dtype
        return self._dtype

    def _buffer(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        import torch

        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != dtype:
            pin = tensor.device.type == "cuda"  # pinned, so that copies of many tensors overlap
            buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=dtype, pin_memory=pin)
        return buffer
