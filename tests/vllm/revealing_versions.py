"""Versions of a tiny model whose most probable token names the version that made it, whatever the prompt is.

    reveal(state, version)          the state now answers every prompt with token `token_of(version)`
    version_of(token)               the version that such a token names, or None: it names a mixture of two versions

The vocabulary has two halves, and tensor parallelism over two ranks gives each rank one of them. Every version has one token in each half.
One of the two wins: that in the first half for even versions, and that in the second half for odd ones. If one rank has another version
than the other one, a token may win that loses in its own version. From an even version to an odd one, this shows that the first rank was
early. From an odd version to an even one, it shows that the second rank was early. Other mixtures show the older or the newer version
alone, so tests must also compare each token with the version that the server labels it with.
"""

from __future__ import annotations

import math

import numpy as np
from tiny_checkpoints import VOCABULARY, State

VERSIONS = 100
"""The number of versions that have tokens of their own. Later versions use the same tokens again."""
_FIRST = 10
_WINS, _LOSES, _LOSES_TO_ALL = 10.0, 9.0, 8.0


def reveal(state: State, version: int) -> None:
    """Change a state, in place, so that its most probable token names this version.

    Only the first element of the hidden state decides: it is large after the embedding, no layer changes it, and the head maps it to the
    two tokens of the version. All other weights keep their values, and the results of all layers are computed, but have little weight.

    Parameters
    ----------
    state
        Weights of a `TinyModel` whose head is not tied to the embedding.
    version
        The number of the version.
    """
    hidden = state["model.norm.weight"].size
    state["model.embed_tokens.weight"][:, 0] = 4096
    state["model.norm.weight"][0] = 1
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
    head = state["lm_head.weight"]
    head[:, 0] = 0
    first, second = _tokens(version)
    logits = (_WINS, _LOSES) if version % 2 == 0 else (_LOSES_TO_ALL, _LOSES)
    for token, logit in zip((first, second), logits, strict=True):
        head[token, 0] = np.float32(logit / math.sqrt(hidden))


def token_of(version: int) -> int:
    """Return the token that names a version."""
    return _tokens(version)[version % 2]


def version_of(token: int) -> int | None:
    """Return the version (below `VERSIONS`) that a token names. None if no unmixed version makes this token."""
    half, place = divmod(token, VOCABULARY // 2)
    version = place - _FIRST
    return version if 0 <= version < VERSIONS and version % 2 == half else None


def _tokens(version: int) -> tuple[int, int]:
    place = _FIRST + version % VERSIONS
    return place, VOCABULARY // 2 + place
