"""Computes the tensors of modules again that an update cannot write element by element, because they are results of arithmetic.

Two ways keep all memory where it is:

recompute
    vLLM's own function computes derived tensors from weights that are written already, within the swap: MLA's projections.
reprocess
    A copy of the module gets the new raw tensors, and vLLM's processing runs on it while the server generates. The results are written in
    the swap: fp8 weights that share one scale after loading, global scales of nvfp4.

Modules with which neither works are loaded anew (load_module.py), within the swap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ....errors import EngineQuarantined, EngineRefused
from ..layout.types import ModuleRule, Scatter, TensorLayout
from ..layout.unit_values import PIECE, storage_units, word_type
from .module_shell import make_shell, process, raw_of
from .reachable import numbers_of, put, states_of, tensors_of

ARITHMETIC = "arithmetic"
"""The class of an output that is computed from a parameter, and cannot be found in it unit by unit."""
FAILED = "failed"
"""The class of a parameter with which processing fails on a copy. Any result may depend on it."""
UNKNOWN = "unknown"
"""The class of all outputs of a module whose processing could not be learnt, because it needs real weights or more memory."""
UNSAFE = "unsafe"
"""The class of all outputs of a module whose processing on a copy changes the live module."""
LOST = "lost"
"""The class of a parameter that processing does not keep in any tensor."""

_WITH_NUMBERS = {"BaseKVCacheMethod"}
"""Methods that keep results as numbers of Python, which a copy cannot bring into a live module."""
_HIDDEN = {"dnnl_handler"}
"""Attributes that hold weights or scales in objects of other libraries, where they cannot be read."""


def rule_for(module: Any, name: str, classes: Mapping[tuple[str, str], str], *, inputs: Sequence[str] = ()) -> ModuleRule:
    """Return what a module needs after some of its inputs have changed.

    Parameters
    ----------
    module
        A module with outputs that are computed, or one for which `derived_from` names others.
    name
        Its name in the model.
    classes
        The class of each output, by parameter and output. Empty for a module that depends only on weights of others.
    inputs
        The tensors of the chain that the module depends on.
    """
    found = tuple(inputs)
    if not classes and derived_from(module):
        return ModuleRule(name, "recompute", found, "its tensors are computed from the weights of another module")
    method = getattr(module, "quant_method", None)
    bases = {base.__name__ for base in type(method).__mro__}
    kind = type(method).__name__
    if moves_experts(module):
        return ModuleRule(name, "refuse", found, "expert load balancing (EPLB) moves its experts while the server runs")
    if bases & _WITH_NUMBERS:
        return ModuleRule(name, "load_anew", found, f"{kind} keeps scales as numbers")
    if UNSAFE in classes.values():
        return ModuleRule(name, "load_anew", found, f"the processing of {kind} on a copy changes the live module")
    if FAILED in classes.values():
        return ModuleRule(name, "load_anew", found, f"the processing of {kind} fails on a copy of the module")
    if hidden := hidden_state(module):
        return ModuleRule(name, "load_anew", found, f"{kind} keeps results in {hidden}")
    if lost := sorted(parameter for (parameter, _), kind_of_output in classes.items() if kind_of_output == LOST):
        return ModuleRule(name, "load_anew", found, f"{kind} does not keep {lost[0]} in a tensor")
    computed = sorted({output for (_, output), kind_of_output in classes.items() if kind_of_output == ARITHMETIC})
    return ModuleRule(name, "reprocess", found, f"{kind} computes {', '.join(computed) or 'its tensors'}")


def moves_experts(module: Any) -> bool:
    """Return whether expert load balancing (EPLB) moves the experts of a module while the server runs."""
    parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
    return bool(getattr(parallel, "enable_eplb", False))


def derived_from(module: Any) -> tuple[Any, ...]:
    """Return the modules whose weights a module's own tensors are computed from, after all modules are processed.

    It is empty for most modules, and for MLA without quantisation: there, the projections are views of the weights.
    """
    source = getattr(module, "kv_b_proj", None)
    if source is None or not callable(getattr(module, "process_weights_after_loading", None)):
        return ()
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(source).values()}
    own = [tensor for tensor in tensors_of(module).values() if tensor.is_floating_point() and tensor.numel() > 1]
    return (source,) if any(tensor.untyped_storage().data_ptr() not in held for tensor in own) else ()


def recompute(model: Any, model_config: Any, rules: Sequence[ModuleRule]) -> None:
    """Compute the derived tensors of modules again, in place, with vLLM's own functions. Call it after the weights were written.

    All tensors stay in the memory that they had, because CUDA graphs read them there. Raises `EngineQuarantined` if that is impossible.

    Parameters
    ----------
    model
        The model.
    model_config
        vLLM's configuration of the model.
    rules
        The rules of modules whose inputs have changed. Rules with other ways than "recompute" are ignored.
    """
    for rule in rules:
        if rule.how == "recompute":
            module = model.get_submodule(rule.name)
            with torch.no_grad(), kept_memory(rule.name, module):
                module.process_weights_after_loading(model_config.dtype)


@contextlib.contextmanager
def kept_memory(name: str, module: Any) -> Iterator[None]:
    """Keep the memory of a module's tensors while the block gives them new values: a tensor in new memory is copied to where it was.

    Raises `EngineQuarantined` after the block if that is impossible, because a tensor has another shape or type, or is missing.

    Parameters
    ----------
    name
        The name of the module, for the error.
    module
        The module.
    """
    before = tensors_of(module)
    yield
    after = tensors_of(module)
    if unfit := sorted(path for path, tensor in before.items() if not _fits(tensor, after.get(path))):
        raise EngineQuarantined(f"vLLM has changed the shape or type of {unfit[0]!r} of {name!r}, which compiled graphs do not see.")
    for path, tensor in before.items():
        if after[path].data_ptr() != tensor.data_ptr():
            tensor.data.copy_(after[path])
            put(module, tuple(path.split(".")), tensor)


def reprocess(module: Any, raw: Mapping[str, torch.Tensor], vllm_config: Any) -> Mapping[str, torch.Tensor]:
    """Process new raw tensors on a copy of a module. Nothing changes in the module.

    Returns the results by paths, as `tensors_of` does. Results that depend on raw tensors which are not given have no meaning.

    Raises `EngineRefused` if the results do not fit the memory of the live module, or if a number that the module holds would change.

    Parameters
    ----------
    module
        The live module.
    raw
        New values of raw tensors, by name, as loaders leave them before processing.
    vllm_config
        vLLM's configuration.
    """
    shell = make_shell(module)
    for name, tensor in raw_of(shell).items():
        if name in raw:
            tensor.data.copy_(raw[name])
        elif tensor.is_floating_point():
            tensor.data.fill_(1)
        else:
            tensor.data.zero_()
    process(shell, vllm_config)
    live, found = tensors_of(module), tensors_of(shell)
    if unfit := _unfit(live, found):
        raise EngineRefused(f"processing gives {unfit[0]!r} of {type(module).__name__} another shape or type than it has in memory.")
    numbers = numbers_of(module)
    changed = sorted(name for name, value in numbers_of(shell).items() if numbers.get(name) != value)
    if changed:
        raise EngineRefused(f"processing changes the number {changed[0]!r} of {type(module).__name__}, which an update cannot write.")
    return found


class RawLayout(Protocol):
    """Knows what loaders copy to raw tensors. `layout.model_layout.ModelLayout` is one."""

    @property
    def tensors(self) -> Mapping[str, TensorLayout]: ...

    def raw(self, module: str, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]: ...

    def constant(self, module: str) -> Collection[str]:
        """Return the paths of tensors that do not depend on the chain."""
        ...


def process_again(
    model: Any,
    vllm_config: Any,
    layout: RawLayout,
    rule: ModuleRule,
    read: Callable[[str], torch.Tensor],
    read_old: Callable[[str], torch.Tensor] | None = None,
) -> list[Scatter]:
    """Process the new raw tensors of a module, and return what changes in its memory. Nothing is written. Raises as `reprocess` does.

    With `read_old`, the old raw tensors are processed first. If that does not give the memory that the module has, it raises
    `EngineRefused`: then the module also depends on something that is not in the chain.

    Parameters
    ----------
    model
        The model.
    vllm_config
        vLLM's configuration.
    layout
        The layout of the model.
    rule
        The rule of the module.
    read
        Returns a whole tensor of the new version, in checkpoint layout.
    read_old
        Returns a whole tensor of the version that the model has. None if the module has been processed again before.
    """
    module = model.get_submodule(rule.name)
    placed = {placement.memory.untyped_storage().data_ptr() for each in layout.tensors.values() for placement in each.placements}
    constant = layout.constant(rule.name)

    def changes(read: Callable[[str], torch.Tensor]) -> list[Scatter]:
        results = reprocess(module, layout.raw(rule.name, read), vllm_config)
        return changed_units(module, {path: each for path, each in results.items() if path not in constant}, skipped=placed)

    if read_old is not None and changes(read_old):
        raise EngineRefused(f"processing does not give the weights that module {rule.name!r} has.")
    return changes(read)


def changed_units(module: Any, results: Mapping[str, torch.Tensor], *, skipped: Collection[int] = ()) -> list[Scatter]:
    """Return what results of `reprocess` change in the memory of a module. Nothing is written.

    Parameters
    ----------
    module
        The live module.
    results
        The new values of its tensors, by paths.
    skipped
        The addresses of storages that are not compared, because an update writes them element by element.
    """
    found: list[Scatter] = []
    seen: set[tuple[Any, ...]] = set()
    for path, live in tensors_of(module).items():
        position = (live.data_ptr(), live.shape, live.stride())
        if path not in results or position in seen or live.numel() == 0 or live.untyped_storage().data_ptr() in skipped:
            continue
        seen.add(position)
        memory = storage_units(live, 8 * live.element_size())
        if pieces := list(_differences(live.detach(), results[path].detach())):
            positions, values = (torch.cat(parts) for parts in zip(*pieces, strict=True))  # a swap takes time for every list
            found.append(Scatter(memory, positions, values))
    return found


def _differences(live: torch.Tensor, new: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield positions in the storage of a live tensor at which new values differ, and these values.

    Most tensors fill their storages. They are compared in pieces, because positions need more memory than values.
    """
    kind, storage = word_type(8 * live.element_size()), live.untyped_storage()
    narrow = torch.int32 if storage.nbytes() // live.element_size() < 2**31 else torch.int64
    if live.nbytes == storage.nbytes() == new.untyped_storage().nbytes() and live.stride() == new.stride():
        held, wanted = (storage_units(tensor, 8 * live.element_size()) for tensor in (live, new))
        for start in range(0, held.numel(), PIECE):
            some = wanted[start : start + PIECE].to(live.device)
            where = (held[start : start + PIECE] != some).nonzero().flatten()
            if len(where):
                yield (where + start).to(narrow), some[where]
        return
    held, wanted = live.view(kind), new.to(live.device).view(kind)
    where = (held != wanted).nonzero()
    if len(where):
        strides = torch.tensor(live.stride(), dtype=torch.int64, device=live.device)
        yield ((where * strides).sum(1) + live.storage_offset()).to(narrow), wanted[tuple(where.T)].reshape(-1)


def _fits(live: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    return live is not None and new is not None and (live.shape, live.dtype) == (new.shape, new.dtype)


def _unfit(live: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the paths of results that do not fit the live tensors. A second path to memory that is known by another one is not needed."""
    both = live.keys() & found.keys()
    unfit = sorted(path for path in both if not _fits(live[path], found[path]))
    for tensors in (live, found):
        known = {tensors[path].untyped_storage().data_ptr() for path in both}
        unfit += sorted(path for path in tensors.keys() - both if tensors[path].untyped_storage().data_ptr() not in known)
    return unfit


def hidden_state(module: Any) -> str | None:
    """Return an attribute of a module or of a helper that holds weights in a form which cannot be read. None if there is none."""
    return next((name for owner in states_of(module) for name in sorted(_HIDDEN) if getattr(owner, name, None) is not None), None)
