"""Make the small files of a checkpoint from a live model: config.json, generation_config.json, and those of its tokenizer."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from ...dtypes import DType
from ...format.checkpoints.checkpoint_copy import WEIGHT_SUFFIXES
from ...tensors.torch_types import torch_name

_WRAPPED = "_orig_mod"
"""The attribute in which `torch.compile` keeps the module that it wraps."""

_DTYPE_NAMES = {"dtype", "torch_dtype"}
"""The names that releases of transformers give the type of the weights in config.json."""


def files_of_model(model: Any, dtype: DType | None = None) -> dict[str, bytes]:
    """Return config.json and generation_config.json of a transformers model, and nothing for any other module.

    `dtype` is the type that all weights are published as. The configuration names it, so that readers load the weights as that type.
    """
    model = getattr(model, _WRAPPED, model)
    files: dict[str, bytes] = {}
    config = _as_json(getattr(model, "config", None))
    if config is not None:
        config["architectures"] = config.get("architectures") or [type(model).__name__.removeprefix("FSDP")]
        if not config.keys() & _DTYPE_NAMES:  # as `save_pretrained` does, by the name that all releases of transformers read
            config["torch_dtype"] = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
        if dtype is not None:
            set_dtype(config, torch_name(dtype))
        files["config.json"] = to_bytes(config)
    generation = _as_json(getattr(model, "generation_config", None))
    if generation is not None:
        files["generation_config.json"] = to_bytes(generation)
    return files


class TokenizerFiles:
    """Returns the files of a tokenizer or processor as it is now. Raises TypeError if it cannot be saved to files.

    Saving a tokenizer of 150,000 tokens takes 0.1 s, so it is only saved again after it has changed. Settings of padding and truncation do
    not count: tokenizers keep those of the last call, so tokenizer.json would change at every other version.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not callable(getattr(tokenizer, "save_pretrained", None)):
            raise TypeError(
                f"tokenizer must be a tokenizer or processor of transformers, not {tokenizer!r:.80}. "
                "Load it (`AutoTokenizer.from_pretrained`), or pass the directory that holds it as `attachments`."
            )
        self._tokenizer = tokenizer
        self._saved: tuple[str, dict[str, bytes]] | None = None

    def read(self) -> dict[str, bytes]:
        """Return the files by name."""
        try:
            now = _describe(self._tokenizer)
        except _CannotTell:
            return _save(self._tokenizer)
        if self._saved is None or self._saved[0] != now:
            self._saved = now, _save(self._tokenizer)
        return self._saved[1]


class _CannotTell(Exception):
    """Only saving the object can tell whether it has changed."""


_NOT_SAVED = {"deprecation_warnings", "verbose", "_in_target_context_manager"}
"""Attributes of tokenizers that change during use and are not saved."""


def _describe(thing: Any) -> str:
    """Return a text that changes if the saved files of a tokenizer would change. Raises `_CannotTell` if that is not possible."""
    if hasattr(thing, "get_added_tokens_decoder"):  # the tokenizers library's own object, which a fast tokenizer wraps
        parts = (thing.normalizer, thing.pre_tokenizer, thing.post_processor, thing.decoder)
        # No code edits a vocabulary in place, and describing all of it would take as long as saving.
        return repr((parts, type(thing.model), thing.get_vocab_size(), sorted(thing.get_added_tokens_decoder().items())))
    if hasattr(thing, "save_pretrained") and hasattr(thing, "__dict__"):
        return repr({name: _describe(value) for name, value in vars(thing).items() if name not in _NOT_SAVED})
    if getattr(type(thing), "__repr__", None) is object.__repr__:
        raise _CannotTell
    return repr(thing)


def _save(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        found = [path for path in sorted(Path(folder).iterdir()) if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES)]
        return {path.name: path.read_bytes() for path in found}


def _as_json(config: Any) -> dict[str, Any] | None:
    """Return what transformers would save of a configuration. None if it is not a configuration of transformers."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        found = json.loads(config.to_json_string())
        return found if isinstance(found, dict) else None
    return None


def set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the type of the weights, also in the configurations of a model's parts."""
    for name, value in config.items():
        if name in _DTYPE_NAMES and isinstance(value, str):
            config[name] = dtype
        elif isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            set_dtype(value, dtype)


def to_bytes(config: dict[str, Any]) -> bytes:
    """Return a configuration as the bytes of its file."""
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
