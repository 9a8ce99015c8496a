"""Calls that gpu_engine.py makes to the workers of a vLLM server (`--worker-extension-cls gpu_engine_probe.Probe`).

They return the memory of the GPU, hashes of the weights and the times of calls, stage an update several times, and reload as vLLM does.
"""

from __future__ import annotations

import hashlib
import importlib
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_WATCHED = {
    "live.live_weights:LiveWeights": ("learn", "digest", "stage", "swap", "write", "write_back", "check", "check_ready"),
    "live.module_rules:ModuleRules": ("process", "run"),
    "live.live_updates:LiveUpdates": ("learn", "adopt", "status"),
    "live.layout_update:LayoutUpdate": ("add", "complete", "apply", "revert", "_add_mixed"),
    "live.direct_files:DirectFiles": ("resolve",),
    "backend:DeltaWireBackend": ("swap", "status"),
}
_SPANS: list[tuple[str, float, float]] = []
"""For each watched call since they were asked for: its name, when it began on the monotonic clock, and its milliseconds."""
_STAGE_TIMES = [1]


class Probe:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def probe_watch(self) -> None:
        """Time the parts of updates from now on."""
        for place, names in _WATCHED.items():
            module, _, kind = place.partition(":")
            owner = getattr(importlib.import_module(f"deltawire.engines.vllm.{module}"), kind)
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, _timed(f"{kind}.{name}", getattr(owner, name)))
        from deltawire.engines.vllm.live.live_weights import LiveWeights

        stage = LiveWeights.stage

        def stage_several_times(weights: Any, *arguments: Any) -> Any:
            for _ in range(_STAGE_TIMES[0] - 1):
                stage(weights, *arguments)
            return stage(weights, *arguments)

        LiveWeights.stage = stage_several_times  # type: ignore[method-assign]

    def probe_stage_times(self, times: int) -> None:
        """Let staging decode each update this many times, so that its effect on generation can be seen."""
        _STAGE_TIMES[0] = times

    def probe_spans(self) -> list[tuple[str, float, float]]:
        """Return the watched calls since the last question."""
        found = [(name, round(start, 5), round(ms, 3)) for name, start, ms in _SPANS]
        _SPANS.clear()
        return found

    def probe_use(self, reset: bool = False) -> dict[str, float]:
        """Return the processor seconds of this worker, its most host memory, and the memory of the GPU, in bytes."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        found: dict[str, float] = {"cpu_s": used.ru_utime + used.ru_stime, "peak_rss": used.ru_maxrss * 1024}
        if torch.cuda.is_available():
            found["free"], found["total"] = torch.cuda.mem_get_info()
            found["allocated"], found["peak_allocated"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            found["reserved"], found["peak_reserved"] = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
            if reset:
                torch.cuda.reset_peak_memory_stats()
        return found

    def probe_kinds(self) -> dict[str, Any]:
        """Return how the weights are held: the number of tensors and elements of each kind, and the rules of modules."""
        weights = getattr(self.weight_transfer_engine, "_weights", None)  # type: ignore[attr-defined]
        layout = getattr(weights, "layout", None)
        if layout is None:
            return {}
        kinds: dict[str, list[int]] = {}
        for tensor in layout.tensors.values():
            counts = kinds.setdefault(tensor.kind, [0, 0])
            counts[0] += 1
            counts[1] += torch.Size(tensor.spec.shape).numel()
        rules = {name: [rule.how, rule.reason[:120]] for name, rule in list(layout.modules.items())[:20]}
        return {"kinds": kinds, "rules": rules, "facts": str(getattr(layout, "facts", None))[:1000]}

    def probe_hashes(self) -> dict[str, str]:
        """Return a hash of each parameter, in the shape that it has."""

        def digest(item: tuple[str, torch.Tensor]) -> tuple[str, str]:
            return item[0], _hash(item[1].detach().cpu().contiguous())

        with ThreadPoolExecutor(12) as pool:
            return dict(pool.map(digest, list(self.model_runner.get_model().named_parameters())))

    def probe_memory(self) -> dict[str, str]:
        """Return a hash of the storage of each tensor of the model, with its shape and its strides."""
        found, storages = {}, {}
        for path, tensor in _tensors(self.model_runner.get_model()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
            found[path] = (f"{tensor.dtype} {tuple(tensor.shape)} by {tensor.stride()}", storage.data_ptr())

        def digest(item: tuple[int, Any]) -> tuple[int, str]:
            pointer, storage = item
            return pointer, _hash(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu())

        with ThreadPoolExecutor(12) as pool:
            hashes = dict(pool.map(digest, storages.items()))
        return {path: f"{what}: {hashes[pointer]}" for path, (what, pointer) in found.items()}

    def probe_wipe(self) -> int:
        """Overwrite all weights of the chain in the model's memory. Returns how many bytes that are."""
        layout = self.weight_transfer_engine._weights.layout  # type: ignore[attr-defined]
        memory = {}
        for tensor in layout.tensors.values():
            for each in (tensor.direct, *(placement.memory for placement in tensor.placements)):
                if each is not None:
                    memory[each.untyped_storage().data_ptr()] = each.untyped_storage()
        with torch.no_grad():
            for storage in memory.values():
                storage.fill_(1)
        return sum(int(storage.nbytes()) for storage in memory.values())

    def probe_reload(self, path: str) -> dict[str, float]:
        """Load everything from a checkpoint on disk, as vLLM does by itself. Returns the seconds, and the most memory of the GPU."""
        before = self.probe_use(True)
        _synchronise()
        start = time.perf_counter()
        self.reload_weights(weights_path=path)  # type: ignore[attr-defined]
        _synchronise()
        seconds, after = time.perf_counter() - start, self.probe_use()
        return {"seconds": seconds, "extra_bytes": after.get("peak_allocated", 0) - before.get("allocated", 0)}


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a model, and tensors that its modules and their methods have as plain attributes."""
    for name, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        method = getattr(module, "quant_method", None)
        held |= {f"quant_method.{key}": value for key, value in vars(method).items()} if hasattr(method, "__dict__") else {}
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and value.numel() and value.device.type != "meta" and "kv_cache" not in key:
                yield f"{name}.{key}", value


def _timed(name: str, inner: Any) -> Any:
    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.monotonic()
        try:
            return inner(*arguments, **named)
        finally:
            _SPANS.append((name, start, (time.monotonic() - start) * 1e3))

    return timed


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()[:16]


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
