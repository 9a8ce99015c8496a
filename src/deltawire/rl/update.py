"""One update of the policy. The optimizer steps only if loss and gradients are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import TrainingFailed
from ..format.rollouts import Rollouts
from .batches import TrainingBatch, training_batch
from .grpo import logprobs_and_entropy, token_logprobs
from .settings import GrpoSettings

_MEASURED = ("loss", "clip_ratio", "truncated_ratio", "importance", "mismatch_kl")
"""The measurements of each batch, averaged over tokens."""


class NotFinite(ArithmeticError):
    """A loss or a gradient is not finite. The weights are unchanged."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The measurements of an update, averaged over all tokens and iterations. `skipped` says why later iterations were skipped, if any."""

    measured: dict[str, float]
    skipped: str | None = None


class PolicyUpdate:
    """Updates the weights of `model` with `optimizer`, batch by batch."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, settings: GrpoSettings, dtype: torch.dtype) -> None:
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._dtype = dtype
        self._device = next(model.parameters()).device

    def batch(self, results: Sequence[Rollouts], for_step: int) -> TrainingBatch:
        """Return these results as tensors."""
        return training_batch(results, for_step=for_step, weights=self._settings.reward_weights)

    def apply(self, batch: TrainingBatch) -> Updated:
        """Step the optimizer `num_iterations` times.

        An error before the optimizer's first step is raised; the weights are then unchanged. If a later iteration fails, it and those after
        it are skipped. Raises `TrainingFailed` if the optimizer itself leaves weights that cannot be published.
        """
        self._model.train()
        parts = list(batch.micro_batches(self._settings.per_device_train_batch_size, self._device))
        olds: list[torch.Tensor | None] = [None] * len(parts)
        if self._settings.num_iterations > 1:
            olds = [self._logprobs(part).detach() for part in parts]
        totals = dict.fromkeys((*_MEASURED, "grad_norm"), 0.0)
        entropy = 0.0
        for done in range(self._settings.num_iterations):
            try:
                measured, entropies = self._gradients(parts, olds, max(1, batch.tokens), with_entropy=done == 0)
            except Exception as error:
                self._optimizer.zero_grad()
                if done == 0:
                    raise
                return Updated(_means(totals, done) | {"entropy": entropy}, f"{type(error).__name__}: {error}")
            self._step_optimizer()
            entropy += entropies
            totals = {name: total + measured[name] for name, total in totals.items()}
        return Updated(_means(totals, self._settings.num_iterations) | {"entropy": entropy})

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
        return failing

    def _gradients(
        self, parts: Sequence[TrainingBatch], olds: Sequence[torch.Tensor | None], tokens: int, *, with_entropy: bool
    ) -> tuple[dict[str, float], float]:
        """Compute the gradient of the loss in the parameters. Raises `NotFinite`."""
        self._optimizer.zero_grad()
        measured = dict.fromkeys(_MEASURED, 0.0)
        entropy = 0.0
        for part, old in zip(parts, olds, strict=True):
            if with_entropy:
                current, entropies = logprobs_and_entropy(self._model, part.ids, part.attention, temperature=self._settings.temperature)
                entropy += float((entropies * part.mask).sum()) / tokens
            else:
                current = self._logprobs(part)
            terms = self._settings.loss(current, part.behaviour, part.advantages, part.mask, old=old, tokens=tokens)
            loss = terms.loss.item()
            if not _is_finite(loss):
                raise NotFinite(f"the loss is {loss}")
            terms.loss.backward()
            measured["loss"] += loss
            measured["clip_ratio"] += terms.clipped / tokens
            measured["truncated_ratio"] += terms.truncated / tokens
            measured["importance"] += terms.weight / tokens
            measured["mismatch_kl"] += terms.mismatch / tokens
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm))
        if not _is_finite(norm):
            raise NotFinite(f"the norm of the gradient is {norm}")
        return measured | {"grad_norm": norm}, entropy

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

    def _logprobs(self, part: TrainingBatch) -> torch.Tensor:
        return token_logprobs(self._model, part.ids, part.attention, temperature=self._settings.temperature)


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
