"""Loads modules anew through vLLM's own loaders, into the memory that the kernels use.

It is for modules whose tensors can be neither written element by element nor computed again (recompute.py). The other modules keep their
weights and are not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ....errors import EngineRefused, ResultMismatch
from ..layout.unit_values import same_words, storage_units
from .reachable import states_of, tensors_of
from .recompute import hidden_state, kept_memory

_RESULTS = "_deltawire_results"
"""The attribute of a module that keeps tensors alive."""


class ModuleLoad:
    """New weights of modules that an update loads anew, and all that is needed to undo it.

    It copies the memory of the modules when it is made, so it must be made while the modules have their old weights.

    The first time, the old weights are loaded before the new ones. If that does not give exactly the memory that the modules have, vLLM
    cannot load them anew, and nothing else would show it.

    Parameters
    ----------
    model
        The model.
    model_config
        vLLM's configuration of the model.
    names
        The names of the modules in the model.
    weights
        All new tensors of the chain that these modules hold elements of, and no others.
    old
        The tensors that the modules have now. None if the modules have been loaded anew before.
    note
        Called when the old weights were loaded, and the modules then had them.
    """

    def __init__(
        self,
        model: Any,
        model_config: Any,
        names: Sequence[str],
        weights: Mapping[str, torch.Tensor],
        old: Mapping[str, torch.Tensor] | None = None,
        note: Callable[[], object] = int,
    ) -> None:
        self._model = model
        self._model_config = model_config
        self._names = names
        self._weights = weights
        self._old = old
        self._note = note
        self.unfit: str | None = None
        """The reason why the modules cannot be loaded anew, if `apply` has found one."""
        self._saved = [_SavedModule(part) for name in names for part in model.get_submodule(name).modules()]
        tensors = [*weights.values(), *(old or {}).values()]
        self.nbytes = sum(tensor.nbytes for tensor in tensors) + sum(saved.nbytes for saved in self._saved)
        """Memory that this occupies."""

    def apply(self) -> None:
        """Load the new weights. After an error, `revert` restores the old ones. Call it on the worker's main thread."""
        if self._old is not None:
            load_modules(self._model, self._model_config, self._names, self._old.items())
            if not all(saved.is_unchanged() for saved in self._saved):
                self.unfit = "vLLM's loaders do not give the weights that it has"
                raise EngineRefused(f"module {self._names[0]!r} cannot be loaded anew: {self.unfit}.")
            self._old = None
            self._note()
        load_modules(self._model, self._model_config, self._names, self._weights.items())

    def revert(self) -> None:
        """Restore the old weights, even if only some of the new ones were loaded."""
        for saved in self._saved:
            saved.restore()

    def check_reverted(self) -> None:
        """Raise `ResultMismatch` unless the modules are exactly as they were."""
        if not all(saved.is_unchanged() for saved in self._saved):
            raise ResultMismatch(f"the old weights of module {self._names[0]!r} could not be restored.")


def load_modules(model: Any, model_config: Any, names: Sequence[str], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all tensors of some modules, and process them as at the start.

    All tensors stay in the memory that they had. Raises `EngineQuarantined` if that is impossible, and the errors of the model's loaders.
    After a failure, the modules may hold a mix of old and new weights.

    Parameters
    ----------
    model
        The model.
    model_config
        vLLM's configuration of the model.
    names
        The names of the modules in the model.
    weights
        All tensors of the chain that these modules hold elements of, and no others.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    modules = {name: model.get_submodule(name) for name in names}
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name, module in modules.items():
            stack.enter_context(kept_memory(name, module))
            if hidden_state(module) is not None:
                stack.enter_context(_kept_results(module))
        for module in modules.values():
            initialize_layerwise_reload(module)
        try:
            model.load_weights(iter(weights))
        finally:  # even after a failure, or the next attempt would find a half-loaded module
            for module in modules.values():
                finalize_layerwise_reload(module, model_config)


@contextlib.contextmanager
def _kept_results(module: Any) -> Iterator[None]:
    """Keep the tensors that processing makes in the block, because an object of another library may hold their addresses.

    vLLM copies them to the memory that the module had, and frees them. The module keeps those of the last block.
    """
    method = module.quant_method
    process, had = method.process_weights_after_loading, "process_weights_after_loading" in vars(method)

    def process_and_keep(layer: Any) -> None:
        process(layer)
        if layer is module:
            vars(module)[_RESULTS] = tensors_of(module)

    vars(method)["process_weights_after_loading"] = process_and_keep
    try:
        yield
    finally:
        if had:
            vars(method)["process_weights_after_loading"] = process
        else:
            del vars(method)["process_weights_after_loading"]


class _SavedModule:
    """The attributes of a module and of its helpers, and copies of all its tensors."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._attributes = [(state, dict(vars(state))) for state in states_of(module)]
        self._containers = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in (dict, list, set)  # such as `_parameters`
        ]
        found = {tensor.untyped_storage().data_ptr(): storage_units(tensor, 8) for tensor in tensors_of(module).values()}
        self._memory = [(live, live.clone()) for live in found.values()]

    @property
    def nbytes(self) -> int:
        return sum(saved.nbytes for _, saved in self._memory)

    def restore(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for state, attributes in self._attributes:
            now = vars(state)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
        for container, contents in self._containers:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        with torch.no_grad():
            for live, saved in self._memory:
                live.copy_(saved)
        get_layerwise_info(self._module).reset()  # vLLM may have failed in the middle of loading this module

    def is_unchanged(self) -> bool:
        held = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(self._module).values()}
        return held == {live.data_ptr() for live, _ in self._memory} and all(same_words(live, saved) for live, saved in self._memory)
