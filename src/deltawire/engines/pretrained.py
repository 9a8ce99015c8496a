"""Loads config and tokenizer from the files of a chain, with transformers. Anyone who can write to the bucket can write these files.

A config that describes a model much larger than the chain's weights is refused.
This module runs no code from the bucket, and no code that the bucket names: `trust_remote_code` is False in every call, and a config's
choice of kernels, which transformers would download from the Hub, is ignored.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from pathlib import Path
from typing import Any

from ..errors import EngineError

_MOST_LAYERS = 10_000
_MOST_TIMES = 8
"""A model may be this many times larger than the chain's weights, because a config may name float32 where the chain has 4 bits."""
_SPARE_BYTES, _SPARE_PARTS = 256 << 20, 10_000
"""A model may have this much in addition to its weights: buffers, and modules without tensors."""
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a directory. Raises `EngineError` if transformers cannot load it without other code."""
    from transformers import AutoTokenizer

    _check_layers(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception as error:  # hostile files can cause any exception
        raise _refusal(
            "tokenizer", f"the chain has no tokenizer that can be loaded: {error}. Publish with `attachments` that contain one.", error
        ) from error
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):  # transformers made it from the config alone
        raise EngineError("the chain has no tokenizer: it has a config, but no file with a vocabulary. Publish with `attachments`.")
    return tokenizer


def load_config(folder: Path) -> Any:
    """Return the config in a directory. Raises `EngineError` if transformers itself does not know it."""
    from transformers import AutoConfig

    _check_layers(folder)
    try:
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        config._attn_implementation = None  # a repository here would be code to download; each machine chooses
        config._experts_implementation = None
    except Exception as error:
        raise _unknown_model(error) from error
    return config


def causal_model(config: Any) -> Any:
    """Return a causal language model with this config and arbitrary weights, on torch's current device. Raises `EngineError`."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except EngineError:
        raise
    except Exception as error:
        raise _unknown_model(error) from error


def check_size(config: Any, state_bytes: int, tensors: int) -> None:
    """Raise `EngineError` if a model with this config would be much larger than the weights that the chain declares.

    The model is built on torch's meta device, which needs no memory for weights. Building stops at the limits.
    """
    import torch
    from torch.nn.modules import module as hooks

    most_bytes = _MOST_TIMES * state_bytes + _SPARE_BYTES
    most_parts = _MOST_TIMES * tensors + _SPARE_PARTS
    thread = threading.get_ident()
    size, parts = 0, 0

    def count(owner: Any, name: str, part: Any) -> None:
        nonlocal size, parts
        if threading.get_ident() != thread:  # another thread builds another model
            return
        parts += 1
        if isinstance(part, torch.Tensor):
            size += part.numel() * part.element_size()
        if size > most_bytes or parts > most_parts:
            raise EngineError(
                f"the chain's config.json describes a model that is much larger than the chain's weights, which are {state_bytes:,} bytes "
                f"in {tensors:,} tensors. Publish the config.json that belongs to the weights."
            )

    register = (
        hooks.register_module_parameter_registration_hook,
        hooks.register_module_buffer_registration_hook,
        hooks.register_module_module_registration_hook,
    )
    with contextlib.ExitStack() as stack:
        for each in register:
            stack.callback(each(count).remove)
        with torch.device("meta"):
            causal_model(copy.deepcopy(config))


def stop_tokens(folder: Path, config: Any) -> set[int]:
    """Return the tokens that end a completion, from a config and generation_config.json. Raises `EngineError`."""
    from transformers import GenerationConfig

    found = _token_ids(config)
    if (folder / "generation_config.json").exists():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise EngineError(f"the chain's generation_config.json cannot be loaded: {error}.") from error
        found |= _token_ids(generation)
    return found


def _check_layers(folder: Path) -> None:
    """Raise `EngineError` if config.json claims too many layers, because transformers builds lists of that length when it reads it."""
    try:
        parts = [json.loads((folder / "config.json").read_bytes())]
    except (OSError, ValueError, RecursionError):
        return  # transformers reports what is wrong
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            for name, value in part.items():
                if "layer" in name and isinstance(value, (int, float)) and value > _MOST_LAYERS:
                    raise EngineError(f"the chain's config.json has {name}={value}; at most {_MOST_LAYERS:,} layers are allowed.")
        if isinstance(part, (dict, list)):
            parts.extend(part.values() if isinstance(part, dict) else part)


def _token_ids(config: Any) -> set[int]:
    tokens = getattr(config, "eos_token_id", None)
    listed = list(tokens) if isinstance(tokens, (list, tuple)) else [] if tokens is None else [tokens]
    if not all(type(token) is int for token in listed):
        raise EngineError(f"eos_token_id in the chain's config is {tokens!r:.80}, not a token id or a list of them.")
    return set(listed)


def _unknown_model(error: Exception) -> EngineError:
    return _refusal("config.json", f"the chain's config.json does not describe a causal language model: {error}.", error)


def _refusal(what: str, message: str, error: Exception) -> EngineError:
    if "trust_remote_code" in str(error):  # transformers advises to set it, which would run code from the bucket
        message = f"the chain's {what} needs Python code that comes with it, and deltawire never runs such code."
        return EngineError(f"{message} Publish a model that transformers itself has a class for.")
    return EngineError(message)
