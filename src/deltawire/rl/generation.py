"""Completions from a transformers model in this process that follows the chain."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..chain.reader_options import ReaderOptions
from ..chain.version import Version
from ..dtypes import DType, dtype_named
from ..engines import HotSwap, ModuleEngine
from ..engines.pretrained import causal_model, check_size, load_config, stop_tokens
from ..engines.prompts import Prompts
from ..errors import EngineError, EngineRefused, EngineUnavailable, UnsupportedRouting
from ..events import OnEvent, emit
from ..fleet.generation import Generated, Stop, never
from ..format.records.trainer_records import Sampling
from ..store import Store
from ..subscribe.model_files import FollowedFiles, ModelFiles
from ..tensors.checkpoint_layout import CheckpointLayout
from ..tensors.torch_types import to_torch
from .routing.routing_recorder import RoutingRecorder
from .sampling import ForwardPass, passes_of, sample


class TransformersGenerator:
    """A `deltawire.fleet.generation.Generator` that runs the chain's own model, on `device`.

    The chain in `store` provides everything: config and tokenizer are attachments, and the weights follow the chain. A changed tokenizer is
    loaded again; a changed config needs a restart of the member. Weights are swapped between two forward passes, so the version of every
    token is known exactly. The KV cache is kept across swaps (`KvCache.KEEP`). With `routing`, the experts that process each token are
    recorded.
    """

    engine = "transformers"
    """The name of the engine, for heartbeats. Objects add its release."""

    def __init__(
        self,
        store: Store,
        *,
        device: str | torch.device = "cpu",
        options: ReaderOptions | None = None,
        poll: float = 0.5,
        routing: bool = False,
        on_event: OnEvent | None = None,
    ) -> None:
        import transformers  # imported here because it takes seconds

        self._prompts = FollowedFiles(store, Prompts.of, options=options)
        self.model, self._stop_tokens = build_model(self._prompts.first, device)
        self.engine = f"transformers {transformers.__version__}"
        end = self._prompts.at(None).tokenizer.eos_token_id
        if end is not None:
            self._stop_tokens.add(end)
        self._policy = HotSwap(store, ModuleEngine(self.model, name="transformers"), options=options, on_event=on_event)
        self._passes = passes_of(self._policy)
        self._recorder = open_recorder(self.model, on_event) if routing else None
        self._poll = poll
        self._is_following = False

    @property
    def forward_pass(self) -> ForwardPass:
        """Entered around every forward pass of `model`. It yields the version of the weights."""
        return self._passes

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a completion."""
        return frozenset(self._stop_tokens)

    @property
    def prompts(self) -> Prompts:
        """The tokenizer of the current version."""
        return self._prompts.at(self.version)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Return the token ids of the rows' prompts, by the tokenizer of the current version."""
        return self._prompts.at(self.version).encode(rows)

    def decode(self, rows: Sequence[Mapping[str, Any]], tokens: Sequence[Sequence[int]]) -> list[Any]:
        """Return completions as rewards see them, by the tokenizer of the current version."""
        return self._prompts.at(self.version).decode(rows, tokens)

    def start(self) -> None:
        if not self._is_following:
            self._is_following = True
            self._policy.start(poll=self._poll)

    @property
    def version(self) -> Version | None:
        return None if self._policy.is_quarantined else self._policy.live

    @property
    def problem(self) -> Exception | None:
        return self._policy.last_error

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop = never) -> list[Generated]:
        if self.version is None:
            raise self.problem or EngineUnavailable("the model does not have a version of the chain yet.")
        return sample(
            self.model, prompts, sampling, forward_pass=self._passes, stop_tokens=self._stop_tokens, stop=stop, recorder=self._recorder
        )

    def close(self) -> None:
        self._policy.close()


def open_recorder(model: Any, on_event: OnEvent | None = None) -> RoutingRecorder | None:
    """Return a recorder of the model's experts, or None if it has no routers that can be recorded. Event: "routing-unusable"."""
    try:
        return RoutingRecorder(model)
    except UnsupportedRouting as error:
        emit(on_event, "routing-unusable", reason=str(error))
        return None


def build_model(files: ModelFiles, device: str | torch.device = "cpu") -> tuple[Any, set[int]]:
    """Build the causal language model that the chain's config describes. Return it with the tokens that end a completion.

    Its weights are arbitrary until the first sync. Raises `EngineError` if config.json is missing, if transformers does not know it, or if
    it describes a model that is much larger than the published weights.
    """
    if "config.json" not in files.files:
        raise EngineError("the chain has no config.json. Publish with `attachments`: the model's directory, or its config and tokenizer.")
    with tempfile.TemporaryDirectory(prefix="deltawire-config-") as name:
        folder = files.write(Path(name))
        config = load_config(folder)
        if files.state_bytes is not None and files.tensors is not None:
            check_size(config, files.state_bytes, files.tensors)
        with torch.device(device):
            model = causal_model(config)
        stopping = stop_tokens(folder, config)
    _take_types(model, files.dtypes if files.recipe is None else _dequantised_types(model, files.dtypes))
    return model.eval().requires_grad_(False), stopping


def _dequantised_types(model: torch.nn.Module, dtypes: Mapping[str, DType]) -> dict[str, DType]:
    """Return the types of a model that a quantised chain is dequantised into: bfloat16, as transformers does, and as kept tensors have."""
    kept = {name: dtype for name, dtype in dtypes.items() if dtype.name in ("BF16", "F16", "F32")}
    return {name: kept.get(name, dtype_named("BF16")) for name, owner in CheckpointLayout(model).owners() if owner.is_floating_point()}


def _take_types(model: torch.nn.Module, dtypes: Mapping[str, DType]) -> None:
    """Cast each weight to its type in the chain, so that published bits can be written into it."""
    layout = CheckpointLayout(model)
    layout.check_in_place()
    owners = max((layout.owners(), [*layout.own_weights().items()]), key=lambda named: len(dict(named).keys() & dtypes.keys()))
    types: dict[int, tuple[torch.Tensor, DType]] = {}
    for name, owner in owners:
        if name in dtypes and types.setdefault(id(owner), (owner, dtypes[name]))[1] != dtypes[name]:
            raise EngineRefused(
                f"{name!r} is {dtypes[name].name} in the chain, but the model stores it in one tensor with others of another type."
            )
    for owner, dtype in types.values():
        owner.data = owner.data.to(to_torch(np.empty(0, dtype.numpy)).dtype)
