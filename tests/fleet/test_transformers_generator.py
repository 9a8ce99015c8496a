"""A generator builds its model from the chain alone, and follows the chain while it generates."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from tiny_models import bits, torch
from tiny_policy import TinyPolicy

from deltawire.engines import pretrained
from deltawire.engines.prompts import Prompts
from deltawire.errors import EngineError, NoChain
from deltawire.fleet.generation import Interrupted
from deltawire.format.records.trainer_records import Sampling
from deltawire.publish import Publisher
from deltawire.rl.generation import TransformersGenerator, build_model
from deltawire.store import Store, open_store
from deltawire.subscribe.model_files import ModelFiles, read_model_files
from deltawire.tensors.module_tensors import named_weights

ROWS = [{"prompt": "w1 w2 w3"}, {"prompt": [{"role": "user", "content": "w4"}]}]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, f"the wait timed out: {what}"
        time.sleep(0.01)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def policy(tmp_path: Path, store: Store) -> Iterator[TinyPolicy]:
    made = TinyPolicy(tmp_path, store)
    made.publish(0)
    yield made
    made.publisher.close()


@pytest.fixture
def generator(policy: TinyPolicy, store: Store) -> Iterator[TransformersGenerator]:
    made = TransformersGenerator(store, poll=0.02)
    made.start()
    wait_until(lambda: made.version is not None, "the first version")
    yield made
    made.close()


def test_the_model_is_built_from_the_chain_and_is_the_trainers_bit_for_bit(policy: TinyPolicy, generator: TransformersGenerator) -> None:
    assert bits(named_weights(generator.model)) == bits(named_weights(policy.model))
    assert generator.engine == f"transformers {metadata.version('transformers')}"
    version = policy.publish(1)
    wait_until(lambda: generator.version == version, "the next version")
    assert bits(named_weights(generator.model)) == bits(named_weights(policy.model))


def test_each_prompt_gets_its_samples_and_each_token_the_version_that_made_it(generator: TransformersGenerator) -> None:
    prompts = generator.encode(ROWS)
    made = generator.generate(prompts, Sampling(samples=3, max_tokens=8, seed=4))
    assert len(made) == 6
    assert generator.version is not None
    for each in made:
        assert 1 <= len(each.tokens) <= 8
        assert each.finished == (each.tokens[-1] == 0)
        assert [(span.start, span.end, span.version) for span in each.spans] == [(0, len(each.tokens), generator.version)]
    again = generator.generate(prompts, Sampling(samples=3, max_tokens=8, seed=4))
    assert [each.tokens.tolist() for each in again] == [each.tokens.tolist() for each in made]


def test_log_probs_are_those_of_the_policy(policy: TinyPolicy, generator: TransformersGenerator) -> None:
    prompt = generator.encode(ROWS)[0]
    (made,) = generator.generate([prompt], Sampling(samples=1, max_tokens=6, temperature=0.5, seed=1))
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*prompt, *made.tokens.tolist()]])).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits / 0.5, -1).gather(-1, torch.from_numpy(made.tokens.astype(np.int64))[:, None])[:, 0]
    assert made.logprobs == pytest.approx(expected.numpy(), abs=0.05)


def test_completions_are_text_for_text_and_a_message_for_messages(generator: TransformersGenerator) -> None:
    text, conversation = generator.decode(ROWS, [[2, 3], [4, 0]])
    assert text == "w0 w1"
    assert conversation == [{"role": "assistant", "content": "w2"}]


def test_generation_ends_soon_after_it_is_told_to(generator: TransformersGenerator) -> None:
    with pytest.raises(Interrupted):
        generator.generate(generator.encode(ROWS), Sampling(samples=2, max_tokens=50), stop=lambda: True)


@pytest.mark.parametrize("row", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": 7}, {"prompt": [1, "w1"]}, {"prompt": []}])
def test_a_row_without_a_prompt_is_refused(generator: TransformersGenerator, row: dict[str, object]) -> None:
    with pytest.raises(EngineError):
        generator.encode([row])


def test_a_prompt_may_be_token_ids(generator: TransformersGenerator) -> None:
    assert generator.encode([{"prompt": [5, 6]}]) == [[5, 6]]


def test_the_types_of_weights_come_from_the_chain_not_from_the_config(tmp_path: Path, store: Store, policy: TinyPolicy) -> None:
    config = policy.model.config
    config.dtype = torch.float32
    files = read_model_files(store)
    assert {dtype.name for dtype in files.dtypes.values()} == {"BF16"}
    config.save_pretrained(tmp_path / "lying")
    lying = type(files)({**files.files, "config.json": (tmp_path / "lying" / "config.json").read_bytes()}, files.dtypes)
    model, stop_tokens = build_model(lying)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert stop_tokens == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 1 << 40}, "much larger than the chain's weights"),
        ({"intermediate_size": 1 << 30}, "much larger than the chain's weights"),
        ({"num_hidden_layers": 9_999}, "much larger than the chain's weights"),
        ({"num_hidden_layers": 10**12}, "at most 10,000 layers"),
    ],
)
def test_a_config_of_a_model_much_larger_than_the_weights_is_refused_before_it_is_built(
    store: Store, policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], message: str
) -> None:
    files = read_model_files(store)
    config = json.dumps({**json.loads(files.files["config.json"]), "layer_types": None, **change}).encode()
    lying = dataclasses.replace(files, files={**files.files, "config.json": config})
    built = []
    build = pretrained.causal_model
    monkeypatch.setattr("deltawire.rl.generation.causal_model", lambda config: built.append(config) or build(config))
    with pytest.raises(EngineError, match=message):
        build_model(lying)
    assert built == []
    build_model(files)  # a correct model is built
    assert len(built) == 1


def test_a_location_without_a_chain_is_reported(store: Store) -> None:
    with pytest.raises(NoChain):
        read_model_files(store)


def test_a_chain_without_config_or_tokenizer_says_what_to_publish(store: Store) -> None:
    with Publisher(store) as publisher:
        publisher.publish({"weight": np.zeros(4, np.float32)}, step=0)
    files = read_model_files(store)
    with pytest.raises(EngineError, match="attachments"):
        build_model(files)
    with pytest.raises(EngineError, match="attachments"):
        Prompts.of(files)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a file that only hostile code would create.

    Nothing may ask whether to run such code, and nothing may be downloaded.
    """

    def asked(*_: object) -> str:
        pytest.fail("the user was asked whether to run code from the bucket")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 15)  # the default without CI's setting
    return tmp_path / "code-was-run"


def hostile_files(policy_files: Path, marker: Path, **config: object) -> dict[str, bytes]:
    """Return the files of a working model, changed so that loading them with trust in remote code would run code."""
    files = {path.name: path.read_bytes() for path in policy_files.iterdir()}
    code = f"open({str(marker)!r}, 'w').close()\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M, LlamaTokenizer as T\n"
    auto_map = {"AutoConfig": "hostile.C", "AutoModelForCausalLM": "hostile.M", "AutoTokenizer": ["hostile.T", None]}
    documents: dict[str, dict[str, object]] = {"config.json": config, "tokenizer_config.json": {"tokenizer_class": "Hostile"}}
    for name, more in documents.items():
        files[name] = json.dumps({**json.loads(files[name]), "auto_map": auto_map, **more}).encode()
    return {**files, "hostile.py": code.encode()}


def test_python_from_the_bucket_is_never_run(tmp_path: Path, store: Store, policy: TinyPolicy, marker: Path) -> None:
    files = hostile_files(tmp_path / "files", marker, model_type="hostile")
    with Publisher(store, attachments=files) as publisher:
        publisher.publish(dict(policy.model.state_dict()))
    found = read_model_files(store)
    assert found.files["hostile.py"] == files["hostile.py"]
    with pytest.raises(EngineError, match="never run"):
        build_model(found)
    with pytest.raises(EngineError, match="never run"):
        Prompts.of(ModelFiles({**found.files, "tokenizer.json": b"{}"}, {}))
    with pytest.raises(EngineError):
        TransformersGenerator(store)
    assert not marker.exists()


def test_classes_of_transformers_are_used_instead_of_code_from_the_bucket(tmp_path: Path, policy: TinyPolicy, marker: Path) -> None:
    files = hostile_files(tmp_path / "files", marker, attn_implementation="anybody/kernel", experts_implementation="anybody/kernel")
    model, _ = build_model(ModelFiles(files, {}))
    assert type(model) is type(policy.model)
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", b'{"eos_token_id": "w1"}'),
        ("generation_config.json", b"[1]"),
        ("config.json", b"[1]"),
        ("config.json", b'{"model_type": "qwen3", "hidden_size": "many"}'),
        ("config.json", b'{"model_type": "qwen3", "num_hidden_layers": 1e400}'),
    ],
)
def test_files_that_make_no_model_are_refused_by_name(tmp_path: Path, policy: TinyPolicy, name: str, content: bytes) -> None:
    files = {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()}
    with pytest.raises(EngineError):
        build_model(ModelFiles({**files, name: content}, {}))
