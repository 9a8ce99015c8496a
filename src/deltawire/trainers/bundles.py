"""Several sets of weights as one version: a policy with its draft model, LoRA adapters, quantisation scales.

Each is a bundle, and a prefix of names tells them apart (deltawire/format/bundle_names.py). They are committed together, so no reader ever
has the policy of one step with the draft model of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..format.bundle_names import join_name
from ..tensors.bits import Tensor

if TYPE_CHECKING:
    import torch

State = Mapping[str, Tensor]


def join_bundles(main: State | None = None, /, **bundles: State) -> dict[str, Tensor]:
    """One state of several. Names of `main` stay as they are, those of the others get their bundle's name before them.

    >>> publisher.publish(join_bundles(policy.snapshot(), draft=draft.snapshot(), adapter=adapter_weights(model)), step=step)
    """
    joined = {join_name("", name): tensor for name, tensor in (main or {}).items()}
    for bundle, state in bundles.items():
        joined |= {join_name(bundle, name): tensor for name, tensor in state.items()}
    return joined


def adapter_weights(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """The tensors of one LoRA adapter of a `peft` model, under the names that its `adapter_model.safetensors` has.

    They are the model's own, not copies.
    """
    from peft import get_peft_model_state_dict

    weights: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in weights.items()}


def adapter_files(model: torch.nn.Module, adapter: str = "default") -> dict[str, bytes]:
    """`adapter_config.json` of an adapter, to be published among the attachments."""
    import json

    config: Any = model.peft_config[adapter]
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return {"adapter_config.json": json.dumps(plain, indent=2, sort_keys=True, default=str).encode()}
