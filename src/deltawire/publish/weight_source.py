"""The weights of a module in training, as they go onto the wire: cast, renamed, filtered, and copied out of the optimizer's way."""

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
    """A module's parameters and persistent buffers, ready to be published under the names that they have in its checkpoints.

    For a transformers model these are the tensors that `save_pretrained` writes, also where the live model has fused some of them.

    >>> source = WeightSource(model, names=lambda name: name.removeprefix("policy."))
    >>> with Publisher("s3://bucket/run", dtype=torch.bfloat16, background=True) as publisher:
    ...     source.publish(publisher, step=step)  # after optimizer.step()

    It is needed for `names`, `keep`, `tied` and `bundle` only; else give the model to `Publisher.publish`. `names` maps the checkpoint's
    names to those on the wire, or to None for what is not published; `keep` is asked for each wire name. Tied weights are published once,
    under their first name, as checkpoints of transformers have them; with `tied=True` under all of their names.

    `dtype` casts floating-point weights in `snapshot`: for uses other than publishing, such as a digest. A publisher casts by its own
    `dtype`, on the GPU too. Tensors that are cast here are copied into buffers on the host, which every snapshot uses again. Others, on
    the CPU or a GPU that the codec works on (docs/gpu.md), are handed over as they are.
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
        """The weights as they are now, by their names on the wire. Good until the module is trained on, or the next snapshot is taken."""
        import torch

        from ..codec.gpu.device import has_kernels

        weights = self._layout.weights()
        dropped = {} if self._tied else tied_names(weights)
        state: dict[str, torch.Tensor] = {}
        is_on_its_way = False
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
                is_on_its_way |= not on_cpu
                state[name] = buffer
        if is_on_its_way:
            torch.accelerator.synchronize()
        return state

    def publish(self, publisher: Publisher, *, step: int | None = None, meta: Mapping[str, str] | None = None) -> Version | PendingVersion:
        """Publish the weights as they are now. With a publisher in the background training may go on as soon as this returns."""
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
