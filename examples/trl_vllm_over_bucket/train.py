"""Trains a model with TRL's AsyncGRPO, and publishes its weights to a bucket at every step.

    python train.py MODEL_DIR BUCKET_URL VLLM_URL [STEPS [OUTPUT_DIR]]

deltawire needs only the line with `weight_transfer`. The lines with `label_samples` report which versions made a sample.
If the program is started again with the same output directory, it continues from its newest checkpoint.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from deltawire.trainers.trl import DeltaWireTransfer
from deltawire.trainers.trl_samples import label_samples


def many_short_words(prompts: list, completions: list, **_: object) -> list[float]:
    """Return a reward that the model can learn: the share of words below w100."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(len(word) <= 3 for word in text.split()) / max(1, len(text.split())) for text in texts]


class PrintMetrics(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if logs and "ratio" in logs:
            print(json.dumps({"step": state.global_step, "ratio": logs["ratio"], "reward": logs.get("reward")}), flush=True)


def main(model: str, bucket: str, server: str, steps: int, output: str) -> None:
    if not torch.cuda.is_available():
        import on_cpu

        on_cpu.replace_what_needs_a_gpu()
    attachments = {path.name: path for path in Path(model).iterdir() if path.suffix in (".json", ".jinja")}
    transfer = DeltaWireTransfer(bucket, attachments=attachments)
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=many_short_words,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{number} w{number + 1}"}]} for number in range(64)]),
        args=AsyncGRPOConfig(
            output_dir=output,
            dtype="bfloat16",
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            max_steps=steps,
            learning_rate=1e-4,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=64,
            weight_sync_steps=1,
            max_staleness=2,
            max_inflight_tasks=8,
            logging_steps=1,
            report_to=[],
            save_steps=2,
            gradient_checkpointing=False,
            vllm_server_base_url=server,
        ),
        callbacks=[PrintMetrics()],
        weight_transfer=transfer,
    )
    samples: Counter[str] = Counter()
    label_samples(trainer, lambda sample: samples.update([" ".join(map(str, sample.versions))]))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output))
    print(json.dumps({"samples by the versions that made them": samples}), flush=True)
    print(json.dumps({"published": [version.seq for version in transfer.versions]}), flush=True)


if __name__ == "__main__":
    defaults = ["10", tempfile.mkdtemp()]
    steps, output = sys.argv[4:] + defaults[len(sys.argv) - 4 :]
    main(*sys.argv[1:4], int(steps), output)
