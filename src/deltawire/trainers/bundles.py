"""Publish several sets of weights as one version: a policy with its draft model, LoRA adapters, or quantisation scales.

Each set is a bundle. The names of its tensors have the bundle's name as a prefix (deltawire/format/bundle_names.py). All bundles are
committed together, so no reader ever has the policy of one step with the draft model of another.
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
    """Join several states into one.

    >>> publisher.publish(join_bundles(policy.snapshot(), draft=draft.snapshot(), adapter=adapter_weights(model)), step=step)

    Parameters
    ----------
    main
        The main state. Its names stay as they are.
    **bundles
        Further states by the names of their bundles. Their tensors get the bundle's name as a prefix.
    """
    joined = {join_name("", name): tensor for name, tensor in (main or {}).items()}
    for bundle, state in bundles.items():
        joined |= {join_name(bundle, name): tensor for name, tensor in state.items()}
    return joined


def adapter_weights(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return the tensors of one LoRA adapter of a `peft` model, by their names in `adapter_model.safetensors`. They are not copied.

    Parameters
    ----------
    model
        The `peft` model.
    adapter
        The name of the adapter.
    """
    from peft import get_peft_model_state_dict

    weights: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in weights.items()}


def adapter_files(model: torch.nn.Module, adapter: str = "default") -> dict[str, bytes]:
    """Return `adapter_config.json` of an adapter. Publish it as an attachment.

    Parameters
    ----------
    model
        The `peft` model.
    adapter
        The name of the adapter.
    """
    import json

    config: Any = model.peft_config[adapter]
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return {"adapter_config.json": json.dumps(plain, indent=2, sort_keys=True, default=str).encode()}
