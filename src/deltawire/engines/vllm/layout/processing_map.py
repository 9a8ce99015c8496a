"""Stage 2 of learning a layout: runs vLLM's processing on a copy of a module, and learns where it moves each unit.

After loading, vLLM packs, transposes, swizzles or requantises the raw parameters of a module. `learn_module` makes a *shell*, a copy of the
module with its own raw parameters, fills these with values that encode their own positions, calls vLLM's processing, and looks where the
values went. The live module is not touched.

1. One run with neutral values everywhere shows the structure of the results.
2. For each parameter, a run with random values shows which storages depend on it. Most are unchanged, and need nothing more.
3. Otherwise several runs fill the parameter with the digits of positions. The results are decoded and described by nests.
4. A last run with random values in all parameters must give exactly what the nests predict. So a result that was computed from two
   parameters is never taken for a permutation of one of them, even if it is one while all scales are equal.

A module that fails any of these is *arithmetic*: it must be processed again, or loaded anew. Modules whose processing only makes views are
not learnt here, because that needs no values (processing_views.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..modules.module_shell import make_shell, process, raw_of
from ..modules.reachable import Path, reachable
from ..modules.recompute import ARITHMETIC, FAILED, UNKNOWN, UNSAFE
from .loader_copies import raw_tensors
from .position_decoder import PositionDecoder, UnitMap, changed_values, complete_table, is_predicted, whole_nest
from .unit_values import Fill, constant_fill, digit_fill, digits_of, neutral_value, random_fill, same_words, storage_units

_BYTES_PER_UNIT = 16
"""The memory for decoding positions, for each unit: its number, its position in memory, and temporary values."""
_LARGE = 1 << 28
"""The results of larger modules are kept in host memory while others are made, so that learning needs little memory of a GPU."""
_FEW = 64
"""Parameters with fewer units than this are filled with random values several times."""


@dataclass(slots=True)
class ModuleMap:
    """The results of processing the raw parameters of a module."""

    maps: dict[str, list[UnitMap]] = field(default_factory=dict)
    """By the names of raw parameters."""
    arithmetic: dict[str, str] = field(default_factory=dict)
    """Raw parameters from which something is computed, with what it is."""
    classes: dict[tuple[str, str], str] = field(default_factory=dict)
    """The class of each result that is not a permutation, by parameter and result (see recompute.py)."""
    constant: set[Path] = field(default_factory=set)
    """Results that depend on none of the parameters that were looked at."""
    runs: int = 0
    """The number of runs of the processing."""


class NotLearnt(Exception):
    """The processing of a module cannot be learnt. The message says why."""

    kind = UNKNOWN
    """The class of the module's outputs (see recompute.py)."""


class LiveModuleChanged(NotLearnt):
    """The processing of a copy has changed attributes of the live module, so it must not run on copies."""

    kind = UNSAFE


def missing_parts() -> list[str]:
    """Return the parts of vLLM that stage 2 needs and that the installed vLLM does not have."""
    missing: list[str] = []
    for path, name in (
        ("vllm.model_executor.layers.quantization.base_config", "QuantizeMethodBase"),
        ("vllm.model_executor.layers.attention", "is_deferred_attention_layer"),
        ("vllm.model_executor.layers.fused_moe.fused_moe_method_base", "FusedMoEMethodBase"),
        ("vllm.model_executor.model_loader.reload.meta", "materialize_meta_tensor"),
    ):
        try:
            if not hasattr(__import__(path, fromlist=[name]), name):
                missing.append(f"{path}.{name}")
        except ImportError:
            missing.append(path)
    return missing


def is_processed(module: Any) -> bool:
    """Return whether vLLM processes the raw parameters of a module after loading, so that stage 2 must learn what it does."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)


def is_attention(module: Any) -> bool:
    """Return whether vLLM computes tensors of this module from other modules, after all of them were processed."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return bool(is_deferred_attention_layer(module))


def same_processing(module: Any) -> tuple[Any, ...]:
    """Return a key that modules with the same processing have in common: classes, shapes and types."""
    raw = [(name, tuple(t.shape), tuple(t.stride()), t.dtype) for each in raw_tensors(module) for name, t in each.items()]
    live = [(path, tuple(t.shape), tuple(t.stride()), t.dtype) for path, t in tensors_of(module).items()]
    method = module.quant_method
    helpers = [getattr(module, "scheme", None), *vars(method).values(), *vars(getattr(module, "scheme", method)).values()]
    kinds = [type(each).__qualname__ for each in helpers if type(each).__module__.startswith("vllm")]
    return type(module), type(method), tuple(raw), tuple(live), tuple(kinds)


def learn_module(module: Any, vllm_config: Any, names: Sequence[str], *, most_bytes: int | None = None) -> ModuleMap:
    """Learn where processing moves the units of some raw parameters of a module. Raises `NotLearnt` if it cannot be learnt.

    Parameters
    ----------
    module
        A module with a quantisation method. It is not changed.
    vllm_config
        vLLM's configuration.
    names
        The raw parameters to look at.
    most_bytes
        The most memory that learning may use on the device.
    """
    study = _Study(module, vllm_config, names, most_bytes)
    study.check_memory()
    before = fingerprint(module)
    try:
        found = study.learn()
    finally:
        if fingerprint(module) != before:
            raise LiveModuleChanged("its processing changes the live module")
    return found


def holds_for(module: Any, vllm_config: Any, found: ModuleMap) -> bool:
    """Return whether a map that was learnt from another module holds for this one, by one run with random values."""
    study = _Study(module, vllm_config, list(found.maps))
    before = fingerprint(module)
    try:
        return not study.wrong_in_random_run(found.maps) and fingerprint(module) == before
    except Exception:
        return False


def tensors_of(module: Any) -> dict[Path, torch.Tensor]:
    """Return all tensors that a module holds: parameters, buffers, attributes, and those of its quantisation method and kernels."""
    return {path: value for path, value in reachable(module) if isinstance(value, torch.Tensor)}


def unit_bits_of(name: str, tensor: torch.Tensor) -> int:
    """Return the width of the units of a raw parameter. Integers that are not scales hold packed 4-bit values."""
    if tensor.dtype in (torch.int32, torch.uint8) and tensor.numel() > 1 and "scale" not in name:
        return 4
    return int(tensor.element_size()) * 8


@dataclass(slots=True)
class _Run:
    """The results of one run of the processing, by storage."""

    storages: dict[Path, torch.Tensor]
    """One tensor of each storage."""
    shapes: dict[Path, tuple[Any, ...]]
    numbers: dict[Path, float]

    def on_host(self) -> _Run:
        """Return the results in host memory, because they are kept while others are made."""
        storages = {path: storage_units(tensor, 8).cpu() for path, tensor in self.storages.items()}
        return _Run(storages, self.shapes, self.numbers)


class _Study:
    """Learns one module."""

    def __init__(self, module: Any, vllm_config: Any, names: Sequence[str], most_bytes: int | None = None) -> None:
        self.module = module
        self.most_bytes = most_bytes
        self.config = vllm_config
        parameters, buffers = raw_tensors(module)
        self.raw = {**parameters, **buffers}
        self.buffers = set(buffers)
        self.names = [name for name in names if name in self.raw]
        self.bits = {name: unit_bits_of(name, tensor) for name, tensor in self.raw.items()}
        live = [tensor for tensor in tensors_of(module).values() if tensor.device.type != "meta"]
        self.device = live[0].device if live else torch.get_default_device()
        self.runs = 0

    def check_memory(self, per_unit: int = 0, name: str | None = None) -> None:
        """Raise `NotLearnt` if the module is certainly too large for the free memory. If it is nearly so, an allocation fails later.

        Parameters
        ----------
        per_unit
            The number of bytes that are needed for each unit of a parameter.
        name
            The parameter.
        """
        needed = int(1.1 * sum(tensor.nbytes for tensor in self.raw.values())) + (0 if name is None else per_unit * self._count(name))
        limit = self.most_bytes
        if limit is None and self.device.type == "cuda":
            limit = int(torch.cuda.mem_get_info(self.device)[0] * 0.9)
        if limit is not None and needed > limit:
            raise NotLearnt(f"learning its layout needs about {needed / 1e9:.1f} GB, and {limit / 1e9:.1f} GB are free")

    def _is_memory_scarce(self) -> bool:
        """Return whether results that are kept should be in host memory, because others do not fit in addition or they are large."""
        size = sum(tensor.nbytes for tensor in self.raw.values())
        if self.device.type == "cuda" and size > _LARGE:
            return True
        needed = 3 * size
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else needed
        return bool(needed > (free if self.most_bytes is None else min(free, self.most_bytes)))

    def learn(self) -> ModuleMap:
        found = ModuleMap()
        try:
            neutral = self._run({})
        except Exception as error:
            raise NotLearnt(f"its processing fails with neutral values: {_brief(error)}") from error
        if self._is_memory_scarce():
            neutral = neutral.on_host()
        live = {path: geometry(tensor) for path, tensor in tensors_of(self.module).items()}
        dependent: set[Path] = set()
        computed_from: dict[str, list[Path]] = {}
        for name in self.names:
            if "idx" in name:
                found.arithmetic[name] = "it holds positions, which are not weights"
                found.classes[name, name] = FAILED
                continue
            try:
                maps, computed = self._learn_parameter(name, neutral, live)
            except Exception as error:
                found.arithmetic[name] = f"its processing fails: {_brief(error)}"
                found.classes[name, name] = FAILED
                continue
            found.maps[name], computed_from[name] = maps, computed
            dependent |= {each.path for each in maps} | set(computed)
            if computed:
                found.arithmetic[name] = f"vLLM computes {', '.join('.'.join(path) for path in sorted(computed)[:3])} from it"
                found.classes |= {(name, ".".join(path)): ARITHMETIC for path in computed}
        computed_paths = {path for paths in computed_from.values() for path in paths}
        for path in computed_paths | self.wrong_in_random_run(found.maps):
            for name, maps in found.maps.items():
                if any(each.path == path for each in maps):
                    found.arithmetic[name] = f"{'.'.join(path)} depends on several parameters"
                    found.classes[name, ".".join(path)] = ARITHMETIC
                    found.maps[name] = [each for each in maps if each.path != path]
        found.constant = neutral.shapes.keys() - dependent
        found.runs = self.runs
        return found

    def _learn_parameter(self, name: str, neutral: _Run, live: Mapping[Path, Any]) -> tuple[list[UnitMap], list[Path]]:
        """Return the permutations of a parameter, and what is computed from it."""
        bits, count = self.bits[name], self._count(name)
        fills = [self._random(name, seed) for seed in range(4 if count < _FEW else 1)]
        tests = [self._run({name: fill}) for fill in fills]
        maps: list[UnitMap] = []
        computed = [path for path, number in neutral.numbers.items() if any(run.numbers.get(path) != number for run in tests)]
        unknown: list[Path] = []
        for path, before in neutral.storages.items():
            after = [run.storages.get(path) for run in tests]
            if all(each is not None and same_words(storage_units(each, 8), storage_units(before, 8)) for each in after):
                continue
            if any(run.shapes != neutral.shapes for run in tests) or live.get(path) != neutral.shapes[path]:
                computed.append(path)
            elif all(fill.equals(storage_units(run.storages[path], bits)) for run, fill in zip(tests, fills, strict=True)):
                maps.append(UnitMap(path, bits, (whole_nest(count),)))
            else:
                unknown.append(path)
        if unknown:
            for path, found in self._decode(name, neutral, unknown).items():
                outcomes = zip(tests, fills, strict=True)
                if found and all(is_predicted(found, run.storages[path], fill, neutral.storages[path]) for run, fill in outcomes):
                    maps += found
                else:
                    computed.append(path)
        return maps, computed

    def _decode(self, name: str, neutral: _Run, paths: Sequence[Path]) -> dict[Path, list[UnitMap]]:
        """Fill a parameter with the digits of positions, and find where each position went."""
        self.check_memory(_BYTES_PER_UNIT, name)
        found = self._decode_with(name, neutral, dict.fromkeys(paths))
        lost = [path for path in paths if not found[path]]
        if lost and self.bits[name] == 4:
            tables = self._tables(name, neutral, lost)
            found |= self._decode_with(name, neutral, {path: table for path, table in tables.items() if table is not None})
        return found

    def _decode_with(self, name: str, neutral: _Run, tables: Mapping[Path, tuple[int, ...] | None]) -> dict[Path, list[UnitMap]]:
        if not tables:
            return {}
        bits, count = self.bits[name], self._count(name)
        digit_bits, offset = digits_of(self.raw[name].dtype, bits)
        blank = self._run({name: self._constant(name, offset)})
        decoders = {path: PositionDecoder(blank.storages[path], bits, count, digit_bits, offset, table) for path, table in tables.items()}
        for number in range(-(-count.bit_length() // digit_bits)):
            run = self._run({name: digit_fill(self._words(name), bits, number, digit_bits, offset, self.device)})
            for path, decoder in decoders.items():
                decoder.add(number, run.storages[path])
        return {path: decoder.maps(path) for path, decoder in decoders.items()}

    def _tables(self, name: str, neutral: _Run, paths: Sequence[Path]) -> dict[Path, tuple[int, ...] | None]:
        """Learn what each 4-bit value becomes, from runs with constants. The constant 0 is the neutral value, so it changes nothing."""
        values: dict[Path, dict[int, set[int]]] = {path: {} for path in paths}
        for value in range(1, 16):
            run = self._run({name: self._constant(name, value)})
            for path in paths:
                values[path][value] = changed_values(run.storages[path], neutral.storages[path])
        return {path: complete_table(found) for path, found in values.items()}

    def wrong_in_random_run(self, maps: Mapping[str, Sequence[UnitMap]]) -> set[Path]:
        """Fill all parameters with random values, and return the results that the maps do not predict."""
        fills = {name: self._random(name, 99, is_mild=True) for name in self.raw if self._is_float(name) or name in maps}
        run = self._run(fills)
        wrong: set[Path] = set()
        for name, found in maps.items():
            for path in {each.path for each in found}:
                same = [each for each in found if each.path == path]
                if path not in run.storages or not is_predicted(same, run.storages[path], fills[name]):
                    wrong.add(path)
        return wrong

    def _words(self, name: str) -> int:
        """Return the number of words of a raw parameter."""
        return self._count(name) // 2 if self.bits[name] == 4 else self._count(name)

    def _count(self, name: str) -> int:
        """Return the number of units of a raw parameter."""
        return _storage_elements(self.raw[name]) * int(self.raw[name].element_size()) * 8 // self.bits[name]

    def _is_float(self, name: str) -> bool:
        return bool(self.raw[name].dtype.is_floating_point)

    def _constant(self, name: str, value: int) -> Fill:
        return constant_fill(self._words(name), self.bits[name], value, self.device)

    def _random(self, name: str, seed: int, *, is_mild: bool = False) -> Fill:
        """Return random values. The seed also depends on the name, so that two parameters never have the same values."""
        seed += 1000 * sum(number * letter for number, letter in enumerate(name.encode(), 1))
        bits, dtype, is_scale = self.bits[name], self.raw[name].dtype, "scale" in name
        return random_fill(self._words(name), bits, dtype, seed, self.device, is_scale=is_scale, is_mild=is_mild)

    # Running the processing

    def _run(self, fills: Mapping[str, Fill]) -> _Run:
        shell = self._shell(fills)
        self.runs += 1
        process(shell, self.config)
        found = _Run({}, {}, {})
        seen: set[int] = set()
        for path, value in reachable(shell):
            if isinstance(value, float):
                found.numbers[path] = value
            if not isinstance(value, torch.Tensor):
                continue
            found.shapes[path] = geometry(value)
            address = value.untyped_storage().data_ptr()
            if address not in seen and value.untyped_storage().nbytes() and value.device == self.device:
                seen.add(address)
                found.storages[path] = value
        return found

    def _shell(self, fills: Mapping[str, Fill]) -> Any:
        """Return a copy of the module whose raw parameters have these values, or neutral ones."""
        shell = make_shell(self.module)
        for name, tensor in raw_of(shell).items():
            if name in fills:
                fills[name].write(storage_units(tensor, self.bits[name]))
            else:
                storage_units(tensor, 8 * tensor.element_size()).fill_(neutral_value(tensor.dtype))
        return shell


def _storage_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements of the storage that a new tensor with this shape and these strides has."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape, the strides, the type and the address of a tensor, and the size of its storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()


def fingerprint(module: Any) -> tuple[Any, ...]:
    """Return what must not change in a live module: its attributes, and the addresses of its tensors."""
    helpers = [value for value in (module.quant_method, getattr(module, "scheme", None), getattr(module, "moe_config", None)) if value]
    objects = [(key, id(value)) for each in (module, *helpers) for key, value in vars(each).items()]
    plain = [(key, value) for each in helpers for key, value in vars(each).items() if isinstance(value, (int, float, str))]
    held = [(key, id(value)) for each in (module._parameters, module._buffers) for key, value in each.items()]
    return objects, plain, held, [(path, tensor.data_ptr()) for path, tensor in tensors_of(module).items()]


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
