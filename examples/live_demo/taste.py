"""The policy of the live demo, and what its users like: answers with letters from the first half of the alphabet."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deltawire.format.records.live_records import Metric

LETTERS = "abcdefghijklmnopqrstuvwxyz .,?!-"
LIKED = frozenset("abcdefghijklmnop")
LENGTH = 12
"""The number of letters of an answer."""
LIKES = Metric("liked", type="float", window=2, low=0.0, high=1.0)
PROMPTS = ["how are you", "tell me more", "what is new", "good morning", "any advice", "a short poem", "who is it", "why not"]
_NOISE = 0.1


def rating(answer: str, draw: random.Random) -> float:
    """Return the rating of a user: the share of the letters that users like, with some noise, from 0 to 1."""
    share = sum(letter in LIKED for letter in answer) / max(1, len(answer))
    return min(1.0, max(0.0, share + draw.gauss(0.0, _NOISE)))


def new_model() -> Any:
    """Return a Llama model with 66,000 random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(LETTERS),
        max_position_embeddings=64,
        initializer_range=64**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> Any:
    """Return a tokenizer with one token per letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, clean_up_tokenization_spaces=False)


def files_of(model: Any) -> dict[str, bytes]:
    """Return the files that engines need besides the weights."""
    with TemporaryDirectory(prefix="deltawire-demo-") as folder:
        model.config.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix == ".json"}
