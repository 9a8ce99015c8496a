"""GRPO with a mixture of experts, with and without router replay: rewards and mismatch of each step, for several seeds.

    python benchmarks/router_replay_training.py --threads 1     # 106 M weights, six runs of 100 steps, about 20 minutes of one core

All runs start from the same pre-trained weights. A step is synchronous: the engine has the trainer's weights, which `quantise_state` has
quantised, computes in bfloat16 and records its experts. The trainer computes in float32. Two runs with the same seed have the same prompts.
Each run that is done is kept in a folder, so the benchmark continues after an interruption. `--modes` divides the runs among processes:
the table has all runs of the folder.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import quantised_rl
import torch
import transformers
from quantised_rl import Run, Size, take_turns, task
from report import RESULTS, Table, keep, show

from deltawire.rl.routing.router_replay import NO_EXPERT, RouterReplay

SIZE = Size(256, 6, 4, 150, 24, 96, 2e-3, 4, 8, 16, 3e-5)
EXPERTS, TOP_K, EXPERT_WIDTH = 128, 4, 176
RECIPE = "fp8-block"
MODES = ("own", "replay")
SEEDS = (0, 1, 2)
WINDOW = 10
"""The number of steps over which rewards are averaged, because those of one step depend on its prompts."""
MEASURED = ("reward", "differing", "mismatch_kl", "logp_difference_max", "ess")


@dataclass
class MoeRun(Run):
    """A run whose engine records its experts, and whose trainer may replay them."""

    replays: bool = False
    experts: Any = None
    """The experts [rows, tokens, layers, top k] of the last completions."""
    decisions: list[int] = field(default_factory=lambda: [0, 0])
    """The recorded decisions of a step, and those of them that the trainer makes differently."""

    def __post_init__(self) -> None:
        self.engine_routers, self.trainer_routers = RouterReplay(self.served), RouterReplay(self.model)

    def draw(self, ids: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.engine_routers.record() as recording:
            drawn = super().draw(ids, count, seed)
        rows, columns = ids.shape
        found = recording.take()
        prompts = found[: rows * columns].reshape(rows, columns, *found.shape[1:])
        others = found[rows * columns :].reshape(count - 1, rows, *found.shape[1:]).swapaxes(0, 1)
        last = np.full_like(prompts[:, :1], NO_EXPERT)  # the engine never processes the last token
        self.experts = np.concatenate([prompts, others, last], 1)
        return drawn

    def logprobs(self, whole: torch.Tensor, here: slice) -> torch.Tensor:
        recorded = self.experts[here]
        if self.replays:
            self.trainer_routers.set(recorded)
            found = super().logprobs(whole, here)
            counts = self.trainer_routers.take_counts()
            replayed, differing = counts.replayed, counts.differing
        else:
            with self.trainer_routers.record() as recording:
                found = super().logprobs(whole, here)
            own = recording.take().reshape(recorded.shape)
            known = recorded[..., 0] != NO_EXPERT
            replayed, differing = int(known.sum()), int((known & (np.sort(own, -1) != np.sort(recorded, -1)).any(-1)).sum())
        self.decisions = [self.decisions[0] + replayed, self.decisions[1] + differing]
        return found

    def step(self, ids: torch.Tensor, size: Size, seed: int) -> None:
        self.decisions = [0, 0]
        super().step(ids, size, seed)
        self.steps[-1]["differing"] = self.decisions[1] / self.decisions[0]


def new_model(size: Size, experts: int = EXPERTS) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=size.width,
        intermediate_size=EXPERT_WIDTH,
        moe_intermediate_size=EXPERT_WIDTH,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.width // size.heads,
        num_experts=experts,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        vocab_size=len(task.LETTERS),
        max_position_embeddings=256,
        initializer_range=size.width**-0.5,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def make_runs(
    folder: Path,
    size: Size = SIZE,
    steps: int = 100,
    seeds: Sequence[int] = SEEDS,
    modes: Sequence[str] = MODES,
    experts: int = EXPERTS,
) -> int:
    """Make the runs that the folder does not have yet. Return the number of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model = quantised_rl.pretrained(folder, new_model(size, experts), size, size.pretraining_steps)
    for seed in seeds:
        for mode in modes:
            file = folder / f"{mode}-{seed}.json"
            if file.exists():
                continue
            began = time.time()
            run = MoeRun.of(RECIPE, model, size)
            run.replays = mode == "replay"
            take_turns([run], size, steps, math.inf, seed)
            print(f"{mode}, seed {seed}: {time.time() - began:.0f} s", flush=True)
            file.with_suffix(".new").write_text(json.dumps(run.steps))
            file.with_suffix(".new").rename(file)
    return sum(weight.numel() for weight in model.parameters())


def table_of(folder: Path, weights: int, experts: int = EXPERTS) -> Table:
    """Return the table of all runs in the folder."""
    runs = {mode: [json.loads(file.read_text()) for file in sorted(folder.glob(f"{mode}-*.json"))] for mode in MODES}
    steps = min(len(run) for each in runs.values() for run in each)
    marks = [steps * quarter // 4 for quarter in (1, 2, 3, 4)]
    table = Table(
        "router-replay-training",
        f"GRPO for {steps} steps with an MoE of {weights / 1e6:,.0f} M weights ({experts} experts, {TOP_K} per token), {RECIPE} engine",
        [
            "trainer uses",
            f"reward, first {WINDOW}",
            *(f"at {mark}" for mark in marks),
            "decisions that differ",
            "k3 KL",
            "largest Δlogp",
            "ESS",
        ],
    )
    for mode, each in runs.items():
        windows = [slice(0, WINDOW), *(slice(max(0, mark - WINDOW), mark) for mark in marks)]
        table.rows.append(
            [
                {"own": "its own routing", "replay": "the engine's routing (replay)"}[mode],
                *(_spread([_mean(run[here], "reward") for run in each], "{:.3f}") for here in windows),
                _spread([100 * _mean(run, "differing") for run in each], "{:.2f}", "%"),
                _spread([_mean(run, "mismatch_kl") for run in each], "{:.2e}"),
                _spread([max(step["logp_difference_max"] for step in run) for run in each], "{:.2f}"),
                _spread([_mean(run, "ess") for run in each], "{:.5f}"),
            ]
        )
    table.notes.append(
        f"Means and standard deviations of {len(runs['replay'])} seeds. Rewards are means of the {WINDOW} steps up to the named one; "
        "the other columns are means of all steps, and the largest Δlogp is that of all tokens of a run, without its sign."
    )
    return table


def keep_steps(folder: Path) -> None:
    """Write the numbers of each step next to the table."""
    runs = {}
    for file in sorted(folder.glob("*.json")):
        steps = json.loads(file.read_text())
        runs[file.stem] = {name: [float(f"{step[name]:.4g}") for step in steps] for name in MEASURED}
    (RESULTS / "router-replay-training-steps.json").write_text(json.dumps(runs).replace("]", "]\n") + "\n")


def _spread(values: list[float], form: str, unit: str = "") -> str:
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(mean(values)) + spread + unit


def _mean(steps: list[dict[str, float]], name: str) -> float:
    return mean(step[name] for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="whether the trainer uses its own routing, or replays"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "deltawire-router-replay-training",
        help="where the pre-trained model and the runs that are done are kept",
    )
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    weights = make_runs(arguments.folder, steps=arguments.steps, seeds=arguments.seeds, modes=arguments.modes)
    if tuple(arguments.modes) == MODES:
        table = table_of(arguments.folder, weights)
        show(table)
        keep(table)
        keep_steps(arguments.folder)


if __name__ == "__main__":
    main()
