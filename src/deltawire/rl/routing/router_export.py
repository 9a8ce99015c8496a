"""Recorded experts as the arrays that other trainers replay: Megatron-Core, verl and SkyRL.

Each function accepts the experts of whole sequences, [tokens, layers with routers, top k], with −1 where nothing was recorded. The last
token of a sequence may have no record, because no token depends on it. These trainers have no way to say that another token has none, and
would replay any experts for it. So `UnusableRouting` is raised for such a sequence: leave it out.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from ...errors import UnusableRouting


class SkyRLExperts(TypedDict):
    """The experts of one sequence, as SkyRL's inference servers send them."""

    data: str
    shape: list[int]
    dtype: str


def experts_for_megatron(sequences: Sequence[NDArray[Any]]) -> list[NDArray[np.int64]]:
    """Return one array [tokens, top k] for each layer with a router, for Megatron-Core's `RouterReplay.set_replay_data`.

    Convert each array with `torch.from_numpy`. A trainer with pipeline stages passes only the layers of its own stage.

    Parameters
    ----------
    sequences
        The experts of each sequence of a micro-batch, in the order in which they are packed.
    """
    if not sequences:
        raise UnusableRouting("there is no sequence to replay.")
    if len({one.shape[1:] for one in sequences}) != 1:
        raise UnusableRouting(f"sequences of one batch have experts of the shapes {sorted({one.shape[1:] for one in sequences})}.")
    parts = []
    for one in sequences:
        recorded = _recorded(one)
        end = np.broadcast_to(np.arange(one.shape[2]), (len(one) - len(recorded), *one.shape[1:]))  # any experts will do
        parts.append(np.concatenate([recorded.astype(np.int64), end]))
    whole = np.concatenate(parts)
    return [np.ascontiguousarray(whole[:, layer]) for layer in range(whole.shape[1])]


def experts_for_verl(experts: NDArray[Any], *, layers: Sequence[int], num_hidden_layers: int, num_experts: int) -> NDArray[Any]:
    """Return the experts of one sequence as verl's `AgentLoopOutput.routed_experts` holds them: [tokens, all layers, top k].

    Parameters
    ----------
    experts
        The experts of the sequence.
    layers
        The numbers of the layers that have routers (`RouterReplay.layers`). The other layers hold zeros, as in vLLM's answers.
    num_hidden_layers
        The number of all layers.
    num_experts
        The number of experts in a layer. It determines the type of the array: uint8, int16 or int32.
    """
    recorded = _recorded(experts)
    if recorded.shape[1] != len(layers) or (layers and not 0 <= min(layers) <= max(layers) < num_hidden_layers):
        raise UnusableRouting(f"{recorded.shape[1]} layers were recorded, but {len(layers)} of {num_hidden_layers} are named.")
    if recorded.size and int(recorded.max()) >= num_experts:
        raise UnusableRouting(f"expert {recorded.max()} was recorded, but the model has {num_experts}.")
    kind = np.uint8 if num_experts <= 256 else np.int16 if num_experts <= 32768 else np.int32
    whole: NDArray[Any] = np.zeros((len(recorded), num_hidden_layers, recorded.shape[2]), kind)
    whole[:, list(layers)] = recorded
    return whole


def experts_for_skyrl(experts: NDArray[Any], *, layers: Sequence[int], num_hidden_layers: int, num_experts: int) -> SkyRLExperts:
    """Return the experts of one sequence in SkyRL's form: base64 of the array that `experts_for_verl` returns, with shape and type.

    Parameters
    ----------
    experts, layers, num_hidden_layers, num_experts
        As for `experts_for_verl`.
    """
    whole = experts_for_verl(experts, layers=layers, num_hidden_layers=num_hidden_layers, num_experts=num_experts)
    little = whole.astype(whole.dtype.newbyteorder("<"))
    return {"data": base64.b64encode(little.tobytes()).decode(), "shape": list(whole.shape), "dtype": whole.dtype.name}


def _recorded(experts: NDArray[Any]) -> NDArray[Any]:
    """Return the experts without the last token if it has no record. Raises `UnusableRouting` if another token has none."""
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        raise UnusableRouting(f"experts are integers [tokens, layers, top k], not {experts.dtype} with the shape {list(experts.shape)}.")
    ordered = np.sort(experts, -1)
    known: NDArray[np.bool_] = ((ordered[..., :1] >= 0).all(-1) & (ordered[..., 1:] != ordered[..., :-1]).all(-1)).all(-1)
    if not known[:-1].all():
        raise UnusableRouting(
            f"the experts of token {int(np.argmin(known))} of {len(known)} were not recorded, and later tokens depend on them.",
            hint="Leave the sequence out of the batch. Only the last token may have no record.",
        )
    return experts if known.all() else experts[:-1]
