"""The tokens of revealing versions name the version that made them, and those of a mixture of two ranks name no version."""

from __future__ import annotations

import numpy as np
import pytest
from revealing_versions import VERSIONS, reveal, token_of, version_of
from tiny_checkpoints import VOCABULARY, State, TinyModel, train

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL = TinyModel("revealing", layers=1)
PROMPTS = np.random.default_rng(1).integers(0, VOCABULARY, (8, 5))


def greedy_tokens(state: State) -> set[int]:
    """Return the most probable tokens after some prompts, at each of their positions."""
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL.config()))
    model.load_state_dict({name: torch.from_numpy(tensor.astype(np.float32)) for name, tensor in state.items()})
    with torch.no_grad():
        return set(model(torch.from_numpy(PROMPTS)).logits.argmax(-1).flatten().tolist())


def trained(version: int) -> State:
    state = MODEL.state()
    for seed in range(version):
        train(state, np.random.default_rng(seed), density=0.2)
    reveal(state, version)
    return state


def on_two_ranks(first: int, second: int) -> State:
    """Return the weights of a version, with the second rank's half of the head from another version."""
    state = trained(first)
    state["lm_head.weight"][VOCABULARY // 2 :] = trained(second)["lm_head.weight"][VOCABULARY // 2 :]
    return state


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_every_prompt_is_answered_with_the_token_of_the_version(version: int) -> None:
    assert greedy_tokens(trained(version)) == {token_of(version)}
    assert version_of(token_of(version)) == version


def test_a_rank_that_is_early_makes_tokens_of_no_version() -> None:
    (early_first,) = greedy_tokens(on_two_ranks(first=3, second=2))  # from 2 to 3, the first rank is early; from 3 to 2, the second one
    assert version_of(early_first) is None
    (other,) = greedy_tokens(on_two_ranks(first=2, second=3))
    assert version_of(other) == 2


def test_all_versions_have_tokens_of_their_own() -> None:
    tokens = [token_of(version) for version in range(VERSIONS)]
    assert len(set(tokens)) == VERSIONS
    assert [version_of(token) for token in tokens] == list(range(VERSIONS))
    named = {version_of(token) for token in range(VOCABULARY)} - {None}
    assert named == set(range(VERSIONS))
