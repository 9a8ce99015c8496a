"""The trainer of the live demo: it learns from what users said about answers, and makes one damaged version on purpose."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

import taste
import torch
from child import tell, tell_event, told_to_stop

from deltawire.fleet.options import FleetOptions
from deltawire.live import LiveTraffic
from deltawire.rl.settings import GrpoSettings
from deltawire.rl.trainer import GrpoTrainer

DAMAGE = 0.5
"""The standard deviation of the noise in a damaged version. Weights have one of about 0.1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--damaged-step", type=int, required=True, metavar="STEP", help="the step whose version is damaged")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stop = told_to_stop()
    model = taste.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
    damage_one_version(model, optimizer, arguments.damaged_step)
    settings = GrpoSettings(prompts=8, num_generations=8, max_completion_length=taste.LENGTH, max_staleness=12)
    with GrpoTrainer(
        model,
        [],
        arguments.url,
        settings=settings,
        optimizer=optimizer,
        attachments=taste.files_of(model),
        fleet=FleetOptions(poll_seconds=0.2, keep_steps=1000),
        live=LiveTraffic(metrics=[taste.LIKES]),
        live_share=1.0,
        on_event=tell_event,
    ) as trainer:
        tell("ready", seq=trainer.version.seq)
        trainer.train(until=10**6, stop=stop.is_set)


def damage_one_version(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Let the weights be noise after one step, as after a bug, and be right again before the next step."""
    kept: list[torch.Tensor] = []
    steps = 0

    def restore(*_: Any) -> None:
        if kept:
            with torch.no_grad():
                for weight, right in zip(model.parameters(), kept, strict=True):
                    weight.copy_(right)
            kept.clear()

    def damage(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            with torch.no_grad():
                for weight in model.parameters():
                    kept.append(weight.clone())
                    weight.add_(DAMAGE * torch.randn_like(weight))

    optimizer.register_step_pre_hook(restore)
    optimizer.register_step_post_hook(damage)


if __name__ == "__main__":
    main()
