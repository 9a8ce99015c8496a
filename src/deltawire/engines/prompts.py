"""Turns rows of a dataset into token ids, and token ids into what reward functions get: TRL's convention, with the chain's tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EngineError
from ..subscribe.model_files import ModelFiles
from .pretrained import load_tokenizer


class Prompts:
    """Encodes prompts and decodes completions.

    The prompt of a row is a text, a list of messages for the tokenizer's chat template, or a list of token ids, which is used unchanged.

    Parameters
    ----------
    tokenizer
        A tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def of(cls, files: ModelFiles) -> Prompts:
        """Use the tokenizer among the attachments. Raises `EngineError` if there is none."""
        with tempfile.TemporaryDirectory(prefix="deltawire-tokenizer-") as folder:
            return cls(load_tokenizer(files.write(Path(folder))))

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Return the token ids of each row's prompt. Raises `EngineError` for a row without a prompt."""
        return [self._ids(row) for row in rows]

    def decode(self, rows: Sequence[Mapping[str, Any]], tokens: Sequence[Sequence[int]]) -> list[Any]:
        """Return completions as reward functions get them: a text, or a list with the assistant's message if the prompt has messages."""
        texts = self.tokenizer.batch_decode([list(map(int, each)) for each in tokens], skip_special_tokens=True)
        return [
            [{"role": "assistant", "content": text}] if _is_conversation(row["prompt"]) else text
            for row, text in zip(rows, texts, strict=True)
        ]

    def _ids(self, row: Mapping[str, Any]) -> list[int]:
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        elif _is_conversation(prompt):
            ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        elif isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
            ids = prompt
        else:
            raise EngineError(f"the prompt of a row must be a text, messages or token ids, not {prompt!r:.80}.")
        if not len(ids):
            raise EngineError(f"the prompt {prompt!r:.80} has no tokens.")
        return [int(token) for token in ids]


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
