"""A plain PyTorch training loop that publishes every step: `python examples/publish_from_training.py URL`.

URL is a directory, s3://BUCKET/PREFIX, gs://… Readers that follow it, such as examples/follow_with_transformers.py, get each version bit
for bit. The model is a small one that this program makes. The lines marked with # are those that publishing adds to the loop.
"""

from __future__ import annotations

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from deltawire import Publisher  #

STEPS = 8
CONFIG = Qwen3Config(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
    tie_word_embeddings=True,
)


def main(url: str) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG)  # fp32 master weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    text = torch.randint(0, CONFIG.vocab_size, (4, 32))

    with Publisher(url, dtype=torch.bfloat16, background=True) as publisher:  # engines serve bf16
        for step in range(STEPS):
            loss = model(text, labels=text).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model, step=step)  # copies the weights and returns; uploading continues during the next step
            print(f"step {step}: loss {loss.item():.4f}")
        publisher.flush()
        version = publisher.version
    assert version is not None
    print(f"version {version.updates} of step {version.step}: {version.bytes:,} bytes for {version.state_bytes:,} of weights")
    print(f"digest {version.digest}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "policy-chain")
