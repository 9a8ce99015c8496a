"""How routers of transformers' MoE models weight the experts that they chose.

A router returns `(logits, weights, experts)`. To replay other experts, their weights must be computed as the router would have. A
`Weighting` does that. `known_weighting` finds the one that a router uses: the router runs on random hidden states, with random parameters,
in several types, and the weighting must give exactly its weights. A router for which none does is refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ...errors import UnsupportedRouting

_ROWS = 16
"""The number of random hidden states that a router is tried with."""
_SETTINGS = ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True))
"""The type of parameters and hidden states, and whether autocast to bfloat16 is on."""


class Weighting(Protocol):
    """Returns the weights [tokens, k] of these experts [tokens, k], from the logits [tokens, experts]."""

    def __call__(self, router: Any, logits: torch.Tensor, experts: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor: ...


def softmax(router: Any, logits: torch.Tensor, experts: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Qwen3-MoE, OLMoE: probabilities in float32, normalised if the model says so, in the type of the logits."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype)


def softmax_float32(router: Any, logits: torch.Tensor, experts: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Mixtral: normalised probabilities in float32."""
    weights = torch.softmax(logits.float(), dim=-1).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True)


def softmax_scaled(router: Any, logits: torch.Tensor, experts: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V2, LongCat: probabilities times a factor, not normalised."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def softmax_clamped(router: Any, logits: torch.Tensor, experts: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """ERNIE 4.5: probabilities divided by their sum, or by a smallest sum, in the type of the hidden states."""
    weights = torch.softmax(logits, dim=1, dtype=torch.float32).gather(1, experts)
    weights = weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=getattr(router, "norm_min", 0.0))
    return weights.to(hidden.dtype)


def sigmoid_scaled(router: Any, logits: torch.Tensor, experts: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3, GLM-4.5: the bias decides only which experts are chosen. It is no part of their weights."""
    weights = logits.sigmoid().gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def sigmoid_float32(router: Any, logits: torch.Tensor, experts: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """MiniMax-M2: normalised sigmoids in float32."""
    weights = torch.sigmoid(logits.float()).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True)


def softmax_of_chosen(router: Any, logits: torch.Tensor, experts: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """gpt-oss: softmax over the logits of the chosen experts alone."""
    chosen = logits.gather(1, experts)
    return torch.softmax(chosen, dim=1, dtype=chosen.dtype)


WEIGHTINGS: tuple[Weighting, ...] = (
    softmax,
    softmax_float32,
    softmax_scaled,
    softmax_clamped,
    sigmoid_scaled,
    sigmoid_float32,
    softmax_of_chosen,
)


def known_weighting(router: torch.nn.Module, name: str) -> tuple[Weighting, int, int]:
    """Return how a router weights its experts, the number of experts, and how many it chooses for each token.

    Raises `UnsupportedRouting` if no weighting gives exactly the router's own weights. The router is not changed.
    """
    try:
        tried = [_tried(router, dtype, autocast, training) for dtype, autocast in _SETTINGS for training in (False, True)]
    except Exception as error:
        raise UnsupportedRouting(f"the router {name!r} ({type(router).__name__}) cannot be tried alone ({error}).") from error
    for logits, weights, experts, _, _ in tried:
        if (
            not (logits.dim() == weights.dim() == experts.dim() == 2)
            or len(logits) != _ROWS
            or weights.shape != experts.shape
            or experts.dtype != torch.int64
        ):
            raise UnsupportedRouting(f"the router {name!r} ({type(router).__name__}) does not return logits, weights and experts.")
    for weighting in WEIGHTINGS:
        if all(_gives(weighting, router, *values) for values in tried):
            logits, _, experts, _, _ = tried[0]
            return weighting, logits.shape[1], experts.shape[1]
    raise UnsupportedRouting(f"the router {name!r} ({type(router).__name__}) weights its experts in a way that deltawire does not know.")


_Tried = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]


def _tried(router: torch.nn.Module, dtype: torch.dtype, autocast: bool, training: bool) -> _Tried:
    """Run the router with random parameters. Return logits, weights, experts, the hidden states, and whether autocast was on."""
    chance = torch.Generator().manual_seed(0)

    def random(shape: torch.Size, kind: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=chance).to(kind)

    state: dict[str, torch.Tensor] = {}
    for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
        if tensor.is_floating_point():
            state[f"router.{name}"] = random(tensor.shape, dtype)
    width = next(tensor.shape[1] for tensor in state.values() if tensor.dim() == 2)
    experts = next(tensor.shape[0] for tensor in state.values() if tensor.dim() == 2)
    hidden = random(torch.Size((_ROWS, width)), dtype)
    extra = [random(torch.Size((experts,)), torch.float32) for _ in range(_biases(router))]
    with torch.no_grad(), _mode(router, training), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = torch.func.functional_call(_WithoutHooks(router), state, (hidden.clone(), *extra), strict=False)
    if not isinstance(out, tuple) or len(out) != 3 or not all(isinstance(each, torch.Tensor) for each in out):
        raise TypeError("it does not return three tensors")
    return (*out, hidden, autocast)


class _WithoutHooks(torch.nn.Module):  # type: ignore[misc]  # torch is not type-checked here
    """Runs a router without its hooks, because another `RouterReplay` may be replaying or recording with them."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, *args: torch.Tensor) -> Any:
        return self.router.forward(*args)


def _biases(router: torch.nn.Module) -> int:
    """Return how many biases the block passes to the router, in addition to the hidden states."""
    parameters = list(inspect.signature(router.forward).parameters)[1:]
    if unknown := [name for name in parameters if not name.endswith("bias")]:
        raise TypeError(f"it needs {unknown[0]!r}")
    return len(parameters)


@contextlib.contextmanager
def _mode(router: torch.nn.Module, training: bool) -> Iterator[None]:
    before = router.training
    router.train(training)
    try:
        yield
    finally:
        router.train(before)


def _gives(
    weighting: Weighting,
    router: Any,
    logits: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    hidden: torch.Tensor,
    autocast: bool,
) -> bool:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = weighting(router, logits, experts, hidden)
    return ours.dtype == weights.dtype and bool((ours == weights).all())
