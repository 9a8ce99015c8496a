"""How a GRPO trainer trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .grpo import GrpoLoss


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """How a step is trained. What TRL's `GRPOConfig` has, too, has its name there.

    Work for the fleet:
      `prompts`: how many rows of the dataset a step trains on.
      `num_generations`: how many completions of each prompt are made; they are compared with each other.
      `tasks`: how many tasks the prompts of a step are divided into. A member takes one at a time.
      `max_completion_length`: how many tokens a completion has at most.
      `temperature`, `top_p`: how tokens are drawn.
      `max_staleness`: how many steps behind the newest version a policy may be that makes a token. 0 is the synchronous mode. With 1 or
      more the fleet works for the next steps while this one is trained and published.

    Training:
      `learning_rate`, `warmup_steps`: of the default optimizer, AdamW. The rate rises over the warm-up and then stays.
      `max_grad_norm`: a larger gradient is scaled down to this norm.
      `num_iterations`: how many times the optimizer steps on each batch.
      `per_device_train_batch_size`: how many completions go through the model together. It changes memory and speed, not the result.
      `loss`: the clip and the cap of importance weights.
      `reward_weights`: the weight of each reward by its name, 1 if not named.
      `max_skipped_steps`: how many steps in a row may be skipped because training on their rollouts fails. One more raises
      `TrainingFailed`.

    Beside training:
      `save_steps`: a checkpoint is written every so many steps. A trainer that dies goes on from the last one.
      `eval_steps`: the evaluation hook is called every so many steps.
      `num_completions_to_print`: how many completions of each step are told of by events "completion".
      `seed`: of the order of rows, and of sampling.
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
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    max_skipped_steps: int = 3
    save_steps: int = 5
    eval_steps: int = 50
    num_completions_to_print: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tasks <= self.prompts:
            raise ValueError("tasks must be at least 1, and prompts at least as many: each task needs a prompt")
        if self.num_generations < 2:
            raise ValueError("num_generations must be at least 2: GRPO compares completions of one prompt")
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
