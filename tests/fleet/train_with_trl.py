"""Train with TRL's AsyncGRPO on all members that join, and print what was trained on, one JSON object per line.

python train_with_trl.py MODEL_DIR STORE STEPS BATCH_SIZE
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trl_vllm_over_bucket"
sys.path.insert(0, str(EXAMPLE))

import on_cpu  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: E402

from deltawire.fleet import FleetOptions  # noqa: E402
from deltawire.trainers.trl import DeltaWireTransfer  # noqa: E402
from deltawire.trainers.trl_rollouts import FleetRolloutWorker  # noqa: E402

GROUPS, SAMPLES = 4, 2


def unused(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    raise AssertionError("members compute the rewards")


class PrintMetrics(TrainerCallback):  # type: ignore[misc]
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "ratio" in logs:
            wanted = ("ratio", "reward", "sample/staleness_max", "fleet/members", "sample/dropped_stale_total")
            print(json.dumps({"step": state.global_step, **{name: logs.get(name) for name in wanted}}), flush=True)


class Recorded(FleetRolloutWorker):
    """Print every sample that is passed to TRL."""

    def _hand_over(self, batch: Any) -> None:
        made = [[each.round, each.task, each.member, sorted(each.versions)] for each in batch.rollouts]
        print(json.dumps({"batch": batch.step, "made": made}), flush=True)
        super()._hand_over(batch)


def main(model: str, store: str, steps: int, batch: int) -> None:
    on_cpu.replace_what_needs_a_gpu()
    attachments = {path.name: path for path in Path(model).iterdir() if path.suffix in (".json", ".jinja")}
    transfer = DeltaWireTransfer(store, engines=0, attachments=attachments)
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{number} w{number + 1}"}]} for number in range(10)])
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=unused,
        train_dataset=dataset,
        args=AsyncGRPOConfig(
            output_dir=tempfile.mkdtemp(),
            dtype="bfloat16",
            use_cpu=True,
            bf16=False,
            max_steps=steps,
            learning_rate=1e-4,
            per_device_train_batch_size=batch,
            num_generations=SAMPLES,
            max_completion_length=12,
            weight_sync_steps=1,
            max_staleness=1,
            token_budget=0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=False,
        ),
        callbacks=[PrintMetrics()],
        weight_transfer=transfer,
        rollout_worker=Recorded(
            transfer, dataset, groups=GROUPS, samples=SAMPLES, max_tokens=12, options=FleetOptions(lease_seconds=10, poll_seconds=0.05)
        ),
    )
    trainer.train()
    print(json.dumps({"published": [version.seq for version in transfer.versions]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
