"""Models of the real classes, small enough for tests. Importing this skips the test file if torch or transformers are missing."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

torch.set_num_threads(1)  # more threads do not help such small models, and threads that wait for each other are slow on a busy machine

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


WORDS = ["<eos>", "<unk>", *(f"w{number}" for number in range(SIZES["vocab_size"] - 2))]
"""The words that the tokenizer knows."""


def qwen(seed: int = 0, *, tied: bool = True, dtype: Any = None, **config: Any) -> Any:
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied, **config))
    return model.to(dtype or torch.bfloat16).eval()


def llama(seed: int = 0, dtype: Any = None) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{name: size for name, size in SIZES.items() if name != "head_dim"})
    return transformers.LlamaForCausalLM(config).to(dtype or torch.bfloat16).eval()


def moe(seed: int = 0, dtype: Any = None) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return transformers.Qwen3MoeForCausalLM(config).to(dtype or torch.bfloat16).eval()


def step(module: Any, seed: int, rate: float = 1e-3) -> None:
    """Simulate an optimizer step. Every parameter changes a little, so some of the bf16 ones change."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_((rate * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))


def clone(state: Any) -> dict[str, Any]:
    """Copy a state. Tied tensors stay tied."""
    return copy.deepcopy({name: tensor.detach() for name, tensor in state.items()})


def new_tokenizer() -> Any:
    """Make a tokenizer with as many words as the model knows, and a chat template."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"
    return fast


def save_tokenizer(folder: Path) -> Path:
    new_tokenizer().save_pretrained(folder)
    return folder


def bits(state: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return types, shapes and bytes, computed with torch alone."""
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in state.items()
    }


def logits(model: Any) -> bytes:
    with torch.no_grad(), warnings.catch_warnings():
        out = model(torch.arange(12)[None]).logits
    return bytes(out.float().numpy().tobytes())
