"""A policy small enough for tests: a real model with a real tokenizer, its chain, and rewards that anybody can recompute.

Importing this skips the test file where torch or transformers are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import SIZES, qwen, step

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

WORDS = ["<eos>", "<unk>", *(f"w{number}" for number in range(SIZES["vocab_size"] - 2))]


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer of as many words as the model knows, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"
    fast.save_pretrained(folder)
    return folder


class TinyPolicy:
    """A model in something like training, and the publisher of its chain."""

    def __init__(self, folder: Path, url: Any) -> None:
        from deltawire import Publisher
        from deltawire.trainers import WeightSource

        self.model = qwen(eos_token_id=0, pad_token_id=0, bos_token_id=None)
        files = save_tokenizer(folder / "files")
        self.model.config.save_pretrained(files)
        self.publisher = Publisher(url, attachments=files)
        self._source = WeightSource(self.model)

    def publish(self, number: int) -> Any:
        """The version of this training step; every one differs from the last."""
        if number:
            step(self.model, number)
        return self._source.publish(self.publisher, step=number)
