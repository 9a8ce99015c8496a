"""Replay recorded experts in TRL's `AsyncGRPOTrainer`.

>>> class Trainer(RouterReplayMixin, AsyncGRPOTrainer):
...     pass

Samples bring their experts. Those of a `FleetRolloutWorker` have what members recorded. Those of TRL's own worker have what its vLLM server
sends, if the server runs with `--enable-return-routed-experts` and `label_samples` was called.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...engines.routed_experts import ModelRouters, read_vllm_experts
from ...errors import EngineError, EngineRefused, UnusableRouting
from ...format.routing import RoutingLayout
from .router_replay import NO_EXPERT, RouterReplay

_EXPERTS = "experts"
"""The key of the experts in a batch of TRL."""


class RouterReplayMixin:
    """Makes TRL's `AsyncGRPOTrainer` replay the experts of its samples. Derive your trainer from this class first.

    The constructor raises `UnsupportedRouting` if the routing of the model is not known. Samples without experts, or with experts that do
    not fit the model, are trained on with the model's own routing; the metric `routing/unusable_total` counts the latter. TRL forwards a
    prefix that several samples share only once. Such a token is processed by the experts of the first sample that has a record of it.

    Parameters
    ----------
    *args, **kwargs
        As for `AsyncGRPOTrainer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replay = RouterReplay(self.model)
        """Replays the experts. It is attached to the model for as long as the trainer exists."""
        if self.rollout_queue is not None:  # only the main process has it
            self.rollout_queue: Any = _Queue(self.rollout_queue, self.replay, self._metrics["train"])

    model: torch.nn.Module
    rollout_queue: Any
    _metrics: dict[str, Any]

    def get_train_dataloader(self) -> Any:
        """Return TRL's dataloader, whose batches also have the experts of each token."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        inner = getattr(loader, "base_dataloader", loader)
        inner.collate_fn = _Collator(inner.collate_fn, self.replay)
        return loader

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss, with the recorded experts in the forward pass and in the backward pass that follows.

        Parameters
        ----------
        model
            The model.
        inputs
            A batch of `get_train_dataloader`.
        *args, **kwargs
            As for TRL.
        """
        experts = inputs.pop(_EXPERTS, None)
        if experts is None:
            self.replay.clear()
        else:
            self.replay.set(experts[inputs["attention_mask"].bool()])
        loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.replay.check_replayed()
        counts = self.replay.take_counts()
        decisions = counts.replayed + counts.unrecorded + counts.damaged
        self._metrics["train"]["routing/replayed_ratio"].append((float(counts.replayed), float(decisions)))
        self._metrics["train"]["routing/differing_ratio"].append((float(counts.differing), float(counts.replayed)))
        self._metrics["train"]["routing/damaged_total"].append(float(counts.damaged))
        return loss


class _Tokens(np.ndarray[Any, Any]):
    """The token ids of a sample, which carry its experts. TRL passes on this array, but no further fields of a sample."""

    experts: NDArray[np.int32] | None = None


class _Queue:
    """Wraps TRL's queue of samples. The token ids of the samples that it returns carry their experts."""

    def __init__(self, samples: Any, replay: RouterReplay, metrics: Any) -> None:
        self._samples = samples
        self._replay = replay
        self._routers = ModelRouters(RoutingLayout(replay.experts, replay.top_k, replay.layers), replay.all_layers)
        self._metrics = metrics

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._samples.get(*args, **kwargs)
        try:
            experts = self._experts_of(sample)
        except (UnusableRouting, EngineError) as error:
            logging.getLogger("deltawire").warning("a sample is trained on without replay: %s", error)
            self._metrics["routing/unusable_total"].append(1.0)
        else:
            if experts is not None:
                sample.input_ids = np.asarray(sample.input_ids).view(_Tokens)
                sample.input_ids.experts = experts
        return sample

    def _experts_of(self, sample: Any) -> NDArray[np.int32] | None:
        """Return the experts of all tokens, or None. Raises `UnusableRouting` or `EngineError`."""
        experts = getattr(sample, "experts", None)
        turns: Sequence[Any] = getattr(sample, "turns", ())
        if experts is None and turns:
            experts = np.full((len(sample.input_ids), len(self._replay.layers), self._replay.top_k), NO_EXPERT, np.int32)
            for turn in turns:
                sent = read_vllm_experts(turn.experts, self._routers, turn.tokens).experts
                free = (experts[: turn.tokens] < 0).any((1, 2))  # a later turn also has the tokens of those before it
                experts[: turn.tokens][free] = sent[free]
        if experts is None:
            return None
        checked = self._replay.check(experts)
        if len(checked) != len(sample.input_ids):
            raise UnusableRouting(f"a sample has {len(sample.input_ids):,} tokens, but the experts of {len(checked):,}.")
        return checked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)


class _Collator:
    """Wraps TRL's collator. It adds the experts of each token to the batch."""

    def __init__(self, collate: Any, replay: RouterReplay) -> None:
        self._collate = collate
        self._shape = (len(replay.layers), replay.top_k)

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = self._collate(examples)
        (rows,) = examples
        found = [_experts_of(row, self._shape) for row in rows]
        if any((each != NO_EXPERT).any() for each in found):
            whole = np.full((*batch["input_ids"].shape, *self._shape), NO_EXPERT, np.int32)
            for number, (row, each) in enumerate(zip(rows, found, strict=True)):
                order = _packed_order(row)
                if batch["input_ids"][number, : len(order)].tolist() != [row.tokens[node] for node in order]:
                    raise EngineRefused("this release of TRL packs samples in an order that deltawire does not know.")
                whole[number, : len(order)] = each[order]
            batch[_EXPERTS] = torch.from_numpy(whole)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collate, name)


def _experts_of(row: Any, shape: tuple[int, int]) -> NDArray[np.int32]:
    """Return the experts of each node of a row of TRL, which is a tree of tokens. The first sample that has a record of a node counts."""
    experts = np.full((len(row.tokens), *shape), NO_EXPERT, np.int32)
    for sample, nodes in zip(row.samples, row.sample_nodes, strict=True):
        recorded = getattr(sample["input_ids"], "experts", None)
        if recorded is not None:
            rows = np.array(nodes)
            free = (experts[rows] < 0).any((1, 2))
            experts[rows[free]] = recorded[free]
    return experts


def _packed_order(row: Any) -> list[int]:
    """Return the nodes of a row in the order in which TRL lays them out: depth first, the first child first."""
    order: list[int] = []
    stack = list(reversed(row.roots.values()))
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(row.children[node].values()))
    return order
