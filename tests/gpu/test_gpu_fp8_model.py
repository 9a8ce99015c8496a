"""A model that transformers loaded from a published fp8-block checkpoint onto a GPU holds codes. It follows the chain in place.

transformers computes with a kernel that it downloads. Here a few lines of torch do what that kernel does, except that activations are not
quantised. Machines without a GPU load the codes onto the CPU, and emulate the GPU only while the model follows.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from emulator.build import compiler
from tiny_models import step, torch, transformers

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="this release of transformers does not load fp8-block")
quantizers = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
pytest.importorskip("accelerate", reason="transformers needs accelerate to load fp8")
if not hasattr(fp8, "fp8_linear"):
    pytest.skip("this release of transformers computes with fp8 in another way", allow_module_level=True)
REAL = torch.cuda.is_available()
if REAL and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("transformers dequantises fp8 on this GPU", allow_module_level=True)
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402

from deltawire.chain.reader_options import ReaderOptions  # noqa: E402
from deltawire.engines import HotSwap, ModuleEngine  # noqa: E402
from deltawire.engines.weights.in_place import InPlaceWeights  # noqa: E402
from deltawire.publish import Publisher  # noqa: E402
from deltawire.publish.writer_options import WriterOptions  # noqa: E402
from deltawire.store.memory import MemoryStore  # noqa: E402
from deltawire.subscribe import Subscriber  # noqa: E402
from deltawire.trainers import WeightSource  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
NOT_PINNED = ReaderOptions(pin=False)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 256}
"""The scales of an expert have the shapes [2, 1] and [1, 2]. transformers would save them without the dimensions of size 1."""


def dequantised_linear(input: Any, weight: Any, weight_scale_inv: Any, block_size: Any, bias: Any = None, *_: Any, **__: Any) -> Any:
    rows, columns = weight.shape
    scales = weight_scale_inv.float().repeat_interleave(block_size[0], 0)[:rows].repeat_interleave(block_size[1], 1)[:, :columns]
    return torch.nn.functional.linear(input, (weight.float() * scales).to(input.dtype), bias)


@pytest.fixture(autouse=True)
def _keeps_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "fp8_linear", dequantised_linear)
    if not REAL:  # transformers would dequantise the weights
        monkeypatch.setattr(quantizers.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


def on_gpu() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if REAL else emulated(EmulatedGpu())


def bits(model: Any) -> dict[str, bytes]:
    return {name: tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in model.state_dict().items()}


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 18, device=DEVICE).reshape(2, 8)).logits


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_model_that_holds_codes_follows_in_place_and_computes_as_a_fresh_load(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if kind == "dense":
        trained = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True))
    else:
        trained = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS))
    trained = trained.to(DEVICE, torch.bfloat16).eval()
    store, mirror = MemoryStore(), tmp_path / "mirror"
    attachments = {"config.json": trained.config.to_json_string().encode()}
    given: dict[str, Any] = {"quantise": "fp8-block", "attachments": attachments, "options": WriterOptions(segment_bytes=1 << 16)}

    def fresh() -> Any:
        with Subscriber(store, mirror=mirror, options=NOT_PINNED) as subscriber:
            subscriber.sync()
            loaded = {"dtype": torch.bfloat16, "device_map": str(DEVICE), "experts_implementation": "eager"}  # which uses `fp8_linear`, too
            return transformers.AutoModelForCausalLM.from_pretrained(subscriber.path, **loaded).eval()

    with Publisher(store, snapshot="device", **given) as publisher:
        publisher.publish(WeightSource(trained).snapshot())
        live = fresh()
        codes = [tensor for tensor in live.state_dict().values() if tensor.dtype == torch.float8_e4m3fn]
        assert len(codes) >= 4
        assert {tensor.device.type for tensor in codes} == {DEVICE.type}
        before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in live.state_dict().items()}
        seen = [bits(live)]
        with on_gpu():
            policy = HotSwap(store, ModuleEngine(live), options=NOT_PINNED)
        with policy:
            for number in range(3):
                with on_gpu():
                    policy.sync()
                expected = fresh()
                assert bits(live) == bits(expected), number
                assert torch.equal(logits(live), logits(expected)), number
                seen.append(bits(live))
                step_on_device(trained, number)
                publisher.publish(WeightSource(trained).snapshot())
            assert isinstance(policy._subscriber._replica._weights.current, InPlaceWeights)  # the model is the only copy
    assert seen[0] == seen[1] != seen[2] != seen[3]
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in live.state_dict().items()} == before


def step_on_device(model: Any, seed: int) -> None:
    """Change all weights so much that some scales change, too."""
    model.cpu()
    step(model, seed, rate=2e-3)
    model.to(DEVICE)
