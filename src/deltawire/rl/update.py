"""One update of the policy. The optimizer steps only if loss and gradients are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import TrainingFailed
from ..format.rollouts import Rollouts
from .batches import TrainingBatch, training_batch
from .grpo import LossTerms, logprobs_and_entropy, token_logprobs
from .mismatch import TokenMismatch
from .routing.router_replay import RouterReplay
from .settings import GrpoSettings

_MEASURED = ("loss", "clip_ratio", "truncated_ratio", "importance", "mismatch_kl")
"""The measurements of each batch, averaged over tokens."""


class NotFinite(ArithmeticError):
    """A loss or a gradient is not finite. The weights are unchanged."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The measurements of an update, averaged over all tokens and iterations, and the mismatch of each token before the update.

    `skipped` says why later iterations were skipped, if any.
    """

    measured: dict[str, float]
    tokens: TokenMismatch
    skipped: str | None = None


class PolicyUpdate:
    """Updates the weights of `model` with `optimizer`, batch by batch.

    With `GrpoSettings.router_replay` it raises `UnsupportedRouting` if the routing of the model is not known. Close it at the end.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, settings: GrpoSettings, dtype: torch.dtype) -> None:
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._dtype = dtype
        self._device = next(model.parameters()).device
        self._replay = RouterReplay(model) if settings.router_replay else None

    def close(self) -> None:
        """Remove the hooks of router replay from the model."""
        if self._replay is not None:
            self._replay.close()

    def batch(self, results: Sequence[Rollouts], for_step: int) -> TrainingBatch:
        """Return these results as tensors. Raises `UnusableRouting` if recorded experts do not fit the model."""
        check = None if self._replay is None else self._replay.check
        return training_batch(results, for_step=for_step, weights=self._settings.reward_weights, check_experts=check)

    def apply(self, batch: TrainingBatch) -> Updated:
        """Step the optimizer `num_iterations` times.

        An error before the optimizer's first step is raised; the weights are then unchanged. If a later iteration fails, it and those after
        it are skipped. Raises `TrainingFailed` if the optimizer itself leaves weights that cannot be published.
        """
        try:
            return self._apply(batch)
        finally:
            self._stop_replay()

    def _apply(self, batch: TrainingBatch) -> Updated:
        self._model.train()
        parts = list(batch.micro_batches(self._settings.per_device_train_batch_size, self._device))
        olds: list[torch.Tensor | None] = [None] * len(parts)
        if self._settings.num_iterations > 1:
            olds = [self._forward(part)[0].detach() for part in parts]
        self._count_routing()  # from here
        totals = dict.fromkeys((*_MEASURED, "grad_norm"), 0.0)
        once: dict[str, float] = {}
        tokens: list[TokenMismatch] = []
        for done in range(self._settings.num_iterations):
            try:
                measured, entropies, drifts = self._gradients(parts, olds, max(1, batch.tokens), with_entropy=done == 0)
            except Exception as error:
                self._optimizer.zero_grad()
                if done == 0:
                    raise
                return Updated(_means(totals, done) | once, TokenMismatch.join(tokens), f"{type(error).__name__}: {error}")
            if done == 0:
                once, tokens = {"entropy": entropies, **self._count_routing(batch.damaged)}, drifts
            self._step_optimizer()
            totals = {name: total + measured[name] for name, total in totals.items()}
        return Updated(_means(totals, self._settings.num_iterations) | once, TokenMismatch.join(tokens))

    def failing_alone(self, results: Sequence[Rollouts], for_step: int) -> dict[int, str]:
        """Return which of these results fail when trained on alone, and why. Changes no weights."""
        failing: dict[int, str] = {}
        for index, result in enumerate(results):
            try:
                batch = self.batch([result], for_step)
                parts = list(batch.micro_batches(self._settings.per_device_train_batch_size, self._device))
                self._gradients(parts, [None] * len(parts), max(1, batch.tokens), with_entropy=False)
            except Exception as error:
                failing[index] = one_line(error)
            finally:
                self._optimizer.zero_grad()
                self._stop_replay()
        return failing

    def _gradients(
        self, parts: Sequence[TrainingBatch], olds: Sequence[torch.Tensor | None], tokens: int, *, with_entropy: bool
    ) -> tuple[dict[str, float], float, list[TokenMismatch]]:
        """Compute the gradient of the loss in the parameters. Return measurements, entropy and mismatch. Raises `NotFinite`."""
        self._optimizer.zero_grad()
        measured = dict.fromkeys(_MEASURED, 0.0)
        entropy = 0.0
        tokens_of_parts: list[TokenMismatch] = []
        rows = 0
        for part, old in zip(parts, olds, strict=True):
            current, entropies = self._forward(part, with_entropy=with_entropy)
            if entropies is not None:
                entropy += float((entropies * part.mask).sum()) / tokens
            terms = self._settings.loss(current, part.behaviour, part.advantages, part.mask, old=old, tokens=tokens)
            loss = terms.loss.item()
            if not _is_finite(loss):
                raise NotFinite(f"the loss is {loss}")
            terms.loss.backward()
            tokens_of_parts.append(_token_mismatch(part, terms, rows))
            rows += len(part.ids)
            measured["loss"] += loss
            measured["clip_ratio"] += terms.clipped / tokens
            measured["truncated_ratio"] += terms.truncated / tokens
            measured["importance"] += terms.weight / tokens
            measured["mismatch_kl"] += terms.mismatch / tokens
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm))
        if not _is_finite(norm):
            raise NotFinite(f"the norm of the gradient is {norm}")
        return measured | {"grad_norm": norm}, entropy, tokens_of_parts

    def _step_optimizer(self) -> None:
        try:
            self._optimizer.step()
        except Exception as error:
            raise TrainingFailed(f"the optimizer failed ({one_line(error)}), so some weights may be changed and others not.") from error
        if not self.weights_are_finite():
            raise TrainingFailed("the optimizer made weights that are not finite.")

    def weights_are_finite(self) -> bool:
        """Return whether all weights are finite in the type that they are published in."""
        return all(_all_finite(weights, self._dtype) for weights in self._model.parameters())

    def _forward(self, part: TrainingBatch, *, with_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs and perhaps entropies. Recorded experts are replayed, also in the backward pass of this forward pass."""
        if self._replay is not None and part.experts is not None:
            self._replay.set(part.experts, part.attention)
        elif self._replay is not None:
            self._replay.clear()
        entropies: torch.Tensor | None = None
        if with_entropy:
            current, entropies = logprobs_and_entropy(self._model, part.ids, part.attention, temperature=self._settings.temperature)
        else:
            current = token_logprobs(self._model, part.ids, part.attention, temperature=self._settings.temperature)
        if self._replay is not None:
            self._replay.check_replayed()
        return current, entropies

    def _stop_replay(self) -> None:
        if self._replay is not None:
            self._replay.clear()

    def _count_routing(self, damaged: int = 0) -> dict[str, float]:
        """Return what was replayed since the last call. Members have dropped `damaged` rows already."""
        if self._replay is None:
            return {}
        counts = self._replay.take_counts()
        decisions = counts.replayed + counts.unrecorded + counts.damaged
        return {
            "routing/replayed_ratio": counts.replayed / max(1, decisions),
            "routing/differing_ratio": counts.differing / max(1, counts.replayed),
            "routing/damaged": counts.damaged + damaged,
        }


def _token_mismatch(part: TrainingBatch, terms: LossTerms, first_row: int) -> TokenMismatch:
    mask = part.mask.cpu().bool()
    rows = torch.arange(len(mask))[:, None].expand_as(mask) + first_row
    return TokenMismatch(
        np.asarray(terms.drift.cpu()[mask], np.float64),
        np.asarray(terms.is_truncated.cpu()[mask], np.bool_),
        np.asarray(part.lags.cpu()[mask], np.int64),
        np.asarray(rows[mask], np.int64),
    )


def one_line(error: Exception) -> str:
    """Return in one line what failed."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, NotFinite) else f"{type(error).__name__}: {text}" if text else type(error).__name__


def _all_finite(weights: torch.Tensor, dtype: torch.dtype) -> bool:
    if not weights.is_floating_point():
        return True
    with torch.no_grad():
        return bool(torch.isfinite(weights.to(dtype)).all())


def _is_finite(value: float) -> bool:
    return -float("inf") < value < float("inf")


def _means(totals: dict[str, float], count: int) -> dict[str, float]:
    return {name: total / count for name, total in totals.items()}
