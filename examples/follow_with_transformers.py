"""Generates with a transformers model and the newest weights: `python examples/follow_with_transformers.py URL [STEP]`.

The program makes the model from the files of the chain. Whenever a version appears, it changes the weights in place between two forward
passes. It ends when the version of STEP has generated (by default 7, the last step of examples/publish_from_training.py).
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import deltawire
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.trainers import WeightSource


def main(url: str, last: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        deltawire.pull(url, f"{folder}/checkpoint")  # for its config.json; the weights may come from elsewhere
        config = AutoConfig.from_pretrained(f"{folder}/checkpoint", trust_remote_code=False)  # never run code from a bucket
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.bfloat16)

    with HotSwap(url, ModuleEngine(model)) as policy:
        policy.sync()
        policy.start(poll=0.1)  # follows the chain by itself from here on
        step = -1
        while step < last:
            with policy.generation() as made_by:
                tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=16, do_sample=False, pad_token_id=0)
            steps = [version.step for version in made_by.versions if version is not None]
            step = max(step, *(number for number in steps if number is not None))
            print(f"{tokens.shape[1]} tokens by the weights of step {' and '.join(map(str, steps))}")
        swap = policy.last_swap
        version = policy.version
    assert version is not None
    if swap is not None:
        print(f"the last swap paused generation for {swap.pause_seconds * 1000:.1f} ms")
    print(f"digest {deltawire.state_digest(WeightSource(model).snapshot())} (published: {version.digest})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "policy-chain", int(sys.argv[2]) if len(sys.argv) > 2 else 7)
