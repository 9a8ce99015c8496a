"""Loading what transformers loads from the files of a chain: the config and the tokenizer. Whoever writes the bucket writes these files.

Nothing here runs code from the bucket, or code that the bucket names: `trust_remote_code` is False in every call, and a config's choice
of kernels, which transformers would download from the Hub, is dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import EngineError

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a directory. Raises `EngineError` if there is none that transformers itself can load."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception as error:  # anything can come of files that anybody may have written
        raise _refusal(
            "tokenizer", f"the chain holds no tokenizer that loads: {error}. Publish with `attachments` that have one.", error
        ) from error
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):  # made of the config alone
        raise EngineError("the chain holds no tokenizer: there is a config, and no file with a vocabulary. Publish with `attachments`.")
    return tokenizer


def load_config(folder: Path) -> Any:
    """Return the config in a directory. Raises `EngineError` if it is none that transformers itself knows."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        config._attn_implementation = None  # the name of a repository would be code to download; each machine chooses for itself
        config._experts_implementation = None
    except Exception as error:
        raise _unknown_model(error) from error
    return config


def causal_model(config: Any) -> Any:
    """Return a causal language model of a config, with weights of no meaning, on torch's current device. Raises `EngineError`."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise _unknown_model(error) from error


def stop_tokens(folder: Path, config: Any) -> set[int]:
    """Return the tokens that end a completion, by a config and the generation_config.json beside it. Raises `EngineError`."""
    from transformers import GenerationConfig

    found = _token_ids(config)
    if (folder / "generation_config.json").exists():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise EngineError(f"the chain's generation_config.json cannot be loaded: {error}.") from error
        found |= _token_ids(generation)
    return found


def _token_ids(config: Any) -> set[int]:
    tokens = getattr(config, "eos_token_id", None)
    listed = list(tokens) if isinstance(tokens, (list, tuple)) else [] if tokens is None else [tokens]
    if not all(type(token) is int for token in listed):
        raise EngineError(f"eos_token_id in the chain's config is {tokens!r:.80}, not a token id or a list of them.")
    return set(listed)


def _unknown_model(error: Exception) -> EngineError:
    return _refusal("config.json", f"the chain's config.json makes no causal language model: {error}.", error)


def _refusal(what: str, message: str, error: Exception) -> EngineError:
    if "trust_remote_code" in str(error):  # transformers' advice is to set it, which would run the bucket's code
        message = f"the chain's {what} needs Python code that comes with it, and such code is never run here."
        return EngineError(f"{message} Publish a model that transformers itself has a class for.")
    return EngineError(message)
