"""Models that vLLM loads in the process of the tests, without a server: their memory is as in a worker."""

from __future__ import annotations

import contextlib
import os
import unittest.mock
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fp8_block_kernel
from safetensors import safe_open
from server_nursery import NOT_COMPILED, ONE_THREAD
from servers import free_port
from tiny_checkpoints import State, TinyModel

import deltawire
from deltawire import Publisher
from deltawire.chain.reader_options import ReaderOptions

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    **ONE_THREAD,
    **NOT_COMPILED,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model as a worker holds it, and vLLM's configuration."""

    model: Any
    vllm_config: Any

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make its configuration vLLM's current one, as loaders and the processing of weights need it."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            yield


def load_model(checkpoint: Path, **options: object) -> LoadedModel:
    """Load a checkpoint with vLLM, with the settings of a server that uses the deltawire backend.

    Parameters
    ----------
    checkpoint
        A directory of a checkpoint.
    options
        Further arguments of vLLM's `EngineArgs`.
    """
    with _vllm_can_run():
        import torch
        from vllm.config import WeightTransferConfig, set_current_vllm_config
        from vllm.distributed import model_parallel_is_initialized
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model

        from deltawire.engines.vllm import plugin

        plugin.register()
        fp8_block_kernel.install()
        arguments: dict[str, Any] = {"enforce_eager": True, "max_model_len": 64, "block_size": 16, "use_tqdm_on_load": False, **options}
        config = EngineArgs(
            model=str(checkpoint), weight_transfer_config=WeightTransferConfig(backend=plugin.BACKEND), **arguments
        ).create_engine_config()
        torch.set_num_threads(1)
        if not model_parallel_is_initialized():
            join_workers(1, 0, f"tcp://127.0.0.1:{free_port()}")
        empty_cache = unittest.mock.patch.object(torch.accelerator, "empty_cache")  # it raises on a CPU; vLLM's worker replaces it too
        with set_current_vllm_config(config), empty_cache:
            return LoadedModel(get_model(vllm_config=config), config)


def join_workers(ranks: int, rank: int, address: str) -> None:
    """Make this process a worker of a server with tensor parallelism, as vLLM's worker for CPUs does. Returns when all workers do this.

    Parameters
    ----------
    ranks
        The number of workers.
    rank
        The rank of this one.
    address
        The URL by which the workers find each other.
    """
    with _vllm_can_run():
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

        with set_current_vllm_config(VllmConfig()):  # without a model, vLLM makes the groups for all kinds of models
            init_distributed_environment(ranks, rank, address, rank, "gloo")
            ensure_model_parallel_initialized(ranks, 1)


def start_backend(loaded: LoadedModel, device: str = "cpu", **info: Any) -> Any:
    """Return a backend as a worker has it.

    Parameters
    ----------
    loaded
        The worker's model.
    device
        The device that the backend is told.
    info
        The settings of `InitInfo`.
    """
    with _vllm_can_run():
        import torch

        from deltawire.engines.vllm import backend as backends
    add_no_methods = unittest.mock.patch.object(backends, "_add_rpc_methods")  # there is no worker, whose import takes seconds
    with loaded.active(), add_no_methods:
        backend = backends.DeltaWireBackend(None, loaded.vllm_config, torch.device(device), loaded.model)
    backend.init_transfer_engine(backends.InitInfo(**info))
    return backend


MTP = {"method": "mtp", "num_speculative_tokens": 1}
"""vLLM's `speculative_config` of a model whose checkpoint has a layer for drafts."""


def load_draft(loaded: LoadedModel) -> Any:
    """Load the draft model as vLLM's worker does after the model: it shares the embedding and the output layer with the model.

    Parameters
    ----------
    loaded
        The model. It was loaded with a `speculative_config`.
    """
    with _vllm_can_run():
        import torch
        from vllm.v1.spec_decode.eagle import EagleProposer

        drafter = EagleProposer.__new__(EagleProposer)  # buffers for proposals are of no use here
        drafter.vllm_config, drafter.speculative_config = loaded.vllm_config, loaded.vllm_config.speculative_config
        drafter.supports_mm_inputs = drafter.parallel_drafting = drafter.use_local_argmax_reduction = False
        with loaded.active(), unittest.mock.patch.object(torch.accelerator, "empty_cache"):
            drafter.load_model(loaded.model)
        return drafter.model


def import_vllm() -> None:
    """Import the parts of vLLM that models need. Its imports make warnings, which are errors in tests."""
    with _vllm_can_run():
        import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
        import vllm.model_executor.layers.quantization.fp8
        import vllm.model_executor.model_loader  # noqa: F401


@contextlib.contextmanager
def _vllm_can_run() -> Iterator[None]:
    """Set the variables of vLLM for a while. Servers of other tests need other values."""
    with warnings.catch_warnings(), unittest.mock.patch.dict(os.environ, _ENVIRONMENT):
        warnings.simplefilter("ignore")
        yield


def publish(folder: Path, model: TinyModel, states: list[State], recipe: str | None = None) -> tuple[str, list[Path]]:
    """Publish versions of a model, and write each of them as a checkpoint.

    Parameters
    ----------
    folder
        An empty directory for everything.
    model
        The model.
    states
        The weights of each version.
    recipe
        The recipe for quantised weights.

    Returns
    -------
    The location of the chain, and the checkpoint of each version.
    """
    start = model.save(folder / "start", states[0])
    attachments = {path.name: path for path in start.iterdir() if path.suffix == ".json"}
    store, checkpoints = str(folder / "store"), []
    with Publisher(store, quantise=recipe, attachments=attachments) as publisher:
        for number, state in enumerate(states):
            publisher.publish(state)
            checkpoints.append(folder / f"version-{number}")
            deltawire.pull(store, checkpoints[-1], options=ReaderOptions(pin=False))
    return store, checkpoints


def read_checkpoint(checkpoint: Path) -> Mapping[str, Any]:
    """Return all tensors of a checkpoint, as tensors of torch."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (it lists names only so)
    return found
