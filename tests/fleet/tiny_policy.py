"""A policy small enough for tests: a real model with a real tokenizer, its chain, and rewards that are easy to recompute.

Importing this module skips the test file if torch or transformers are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import WORDS as WORDS
from tiny_models import qwen, save_tokenizer, step


class TinyPolicy:
    """A model with simulated training, and the publisher of its chain."""

    def __init__(self, folder: Path, url: Any) -> None:
        from deltawire import Publisher
        from deltawire.trainers import WeightSource

        self.model = qwen(eos_token_id=0, pad_token_id=0, bos_token_id=None)
        files = save_tokenizer(folder / "files")
        self.model.config.save_pretrained(files)
        self.publisher = Publisher(url, attachments=files)
        self._source = WeightSource(self.model)

    def publish(self, number: int) -> Any:
        """Publish the version of this training step. Every version differs from the one before it."""
        if number:
            step(self.model, number)
        return self._source.publish(self.publisher, step=number)
