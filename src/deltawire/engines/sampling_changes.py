"""Tells which parameters of a request change what an engine draws, besides the temperature and top_p.

Training assumes that tokens were drawn from the model's distribution, changed by the temperature and top_p alone. Everything else makes
another distribution, such as top_k, penalties, or a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""A vLLM server may have defaults of its own for these, in generation_config.json or --override-generation-config."""

_TOO_LARGE = 1e9

_CARRIED = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""These extra arguments say where data are, and not how tokens are drawn."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "trace_decode_token_ids": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
}
"""The values with which a parameter changes nothing, besides its absence."""


def _has_format(value: Any) -> bool:
    return value is not None and not (isinstance(value, dict) and value.get("type") == "text")


def _has_text_format(value: Any) -> bool:
    return isinstance(value, dict) and _has_format(value.get("format"))


def _has_strict_tool(value: Any) -> bool:
    tools = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    inner = [each["function"] for each in tools if isinstance(each.get("function"), dict)]
    return any(each.get("strict") for each in (*tools, *inner))


def _has_extra(value: Any) -> bool:
    return bool(value) and not (isinstance(value, dict) and value.keys() <= _CARRIED)


_OTHERS: Mapping[str, Callable[[Any], bool]] = {
    "response_format": _has_format,
    "text": _has_text_format,
    "tools": _has_strict_tool,
    "extra_args": _has_extra,
}
NAMES = (*_NEUTRAL, *_OTHERS)
"""The parameters that are looked at, of requests and of vLLM's `SamplingParams`."""


def changed_by(given: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that change what is drawn, besides the temperature and top_p.

    Parameters
    ----------
    given
        The body of a request, or the parameters that an engine used. Parameters that are absent or None change nothing.
    """
    found = [name for name, neutral in _NEUTRAL.items() if (value := given.get(name)) is not None and value not in neutral]
    found += [name for name, changes in _OTHERS.items() if changes(given.get(name))]
    best, drawn = given.get("best_of"), given.get("n") or 1
    if best is not None and best != drawn:
        found.append("best_of")
    return found


def not_named(body: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters for which an engine may use a default of its own.

    Parameters
    ----------
    body
        The body of a request.
    """
    return [name for name in DEFAULTED if number_of(body.get(name)) is None]


def number_of(value: Any) -> float | None:
    """Return a parameter of the sampling as it can be recorded. None if it is not a number, or too large for one."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _TOO_LARGE
    return float(value) if is_number else None
