"""The settings of a GRPO trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .grpo import GrpoLoss
from .mismatch_alarm import AlarmRule


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """The settings of one training step. Settings that TRL's `GRPOConfig` also has carry the same names.

    Parameters
    ----------
    prompts
        Rows of the dataset per step.
    num_generations
        Completions per prompt. GRPO compares them with each other.
    tasks
        Tasks that the prompts of a step are divided into. A member leases the next one while it works on one.
    max_completion_length
        Largest number of tokens in a completion.
    temperature
        The sampling temperature.
    top_p
        Tokens are drawn from the most probable ones whose probabilities sum to this.
    max_staleness
        How many steps behind the newest version a policy may be when it makes a token. With 0 training is synchronous. With 1 or more the
        fleet works for the next steps while this one is trained and published.
    learning_rate
        The learning rate of the default optimizer, AdamW.
    warmup_steps
        Steps over which the learning rate rises from 0. It is constant afterwards.
    max_grad_norm
        Larger gradients are scaled down to this norm.
    num_iterations
        Optimizer steps per batch.
    per_device_train_batch_size
        Completions that go through the model together. It changes memory and speed, not the result.
    loss
        The clip, and the bounds of importance weights.
    router_replay
        Train an MoE model with the experts that the members recorded (docs/router-replay.md). Results without recorded
        experts are trained on with the model's own routing.
    mismatch_alarm
        When a member's mismatch stands out, and whether it is then taken out of the fleet.
    reward_weights
        The weight of each reward by its name. The default weight is 1.
    max_skipped_steps
        How many steps in a row may be skipped because training on their rollouts fails. One more raises `TrainingFailed`.
    save_steps
        Steps between two checkpoints. A restarted trainer continues from the last checkpoint.
    eval_steps
        Steps between two calls of the evaluation hook.
    num_completions_to_print
        Completions per step that are emitted as events "completion".
    seed
        The seed of the order of rows and of sampling.
    """

    prompts: int = 8
    num_generations: int = 8
    tasks: int = 4
    max_completion_length: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    max_staleness: int = 1
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    num_iterations: int = 1
    per_device_train_batch_size: int = 64
    loss: GrpoLoss = field(default_factory=GrpoLoss)
    router_replay: bool = False
    mismatch_alarm: AlarmRule = field(default_factory=AlarmRule)
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    max_skipped_steps: int = 3
    save_steps: int = 5
    eval_steps: int = 50
    num_completions_to_print: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tasks <= self.prompts:
            raise ValueError("tasks must be at least 1 and at most prompts, because each task needs a prompt")
        if self.num_generations < 2:
            raise ValueError("num_generations must be at least 2, because GRPO compares completions of one prompt")
        for name in ("max_completion_length", "num_iterations", "per_device_train_batch_size", "save_steps", "eval_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("max_staleness", "warmup_steps", "max_skipped_steps", "num_completions_to_print"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        if not self.max_grad_norm > 0:
            raise ValueError("max_grad_norm must be positive")
        if not all(math.isfinite(weight) and abs(weight) <= 1e6 for weight in self.reward_weights.values()):
            raise ValueError("reward_weights must be from -1e6 to 1e6")
