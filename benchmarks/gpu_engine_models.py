"""Models of random weights for gpu_engine.py: their configuration, their weights, small changes of them, and their checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deltawire.quantise import QuantisedLayout, quantise_state

State = dict[str, np.ndarray[Any, Any]]
Config = dict[str, Any]

_BF16, _F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
_NAMES = {_BF16: "BF16", _F8: "F8_E4M3", np.dtype(np.float32): "F32"}
_NAMES |= {np.dtype(np.uint8): "U8", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64"}
RECIPE = "deltawire_recipe"
"""The key of a configuration that names the recipe by which the weights are quantised. vLLM ignores it."""
_SHARD_BYTES = 2 << 30
_POOL = ThreadPoolExecutor(min(16, os.cpu_count() or 1))


def _qwen3(sizes: tuple[int, int, int, int, int, int, int], *, experts: int = 0, expert: int = 0, fp8: bool = False) -> Config:
    """Return the configuration of a Qwen3 model.

    Parameters
    ----------
    sizes
        Hidden size, layers, heads, heads of keys and values, size of a head, intermediate size, vocabulary.
    experts, expert
        The number of experts of each layer, and the intermediate size of each. 0 makes a dense model.
    fp8
        Whether the weights are e4m3 with a scale for each block of 128 × 128.
    """
    hidden, layers, heads, key_heads, head, inner, vocabulary = sizes
    config: Config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if experts else "qwen3",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if experts:
        config |= {"num_experts": experts, "num_experts_per_tok": min(8, experts), "moe_intermediate_size": expert}
        config |= {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []}
    if fp8:
        quantisation = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        config["quantization_config"] = {**quantisation, "modules_to_not_convert": ["lm_head"]}
    return config


def _mla(config: Config, heads: int) -> Config:
    """Return the configuration of a dense DeepSeek-V2 model, whose attention is MLA, with the sizes of a Qwen3 model."""
    more = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_attention_heads": heads}
    more |= {"num_key_value_heads": heads, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    more |= {"v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    more |= {"first_k_dense_replace": config["num_hidden_layers"], "moe_layer_freq": 1}  # so no layer has experts
    more |= {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "scoring_func": "softmax"}
    return {**config, **more, "routed_scaling_factor": 1.0}


def _gpt_oss(config: Config) -> Config:
    """Return the configuration of a gpt-oss model with the sizes of a Qwen3 model with experts. `new_state` quantises the experts."""
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    more = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "sliding_window": 128}
    more |= {"num_local_experts": config["num_experts"], "num_experts_per_tok": 4, "intermediate_size": config["moe_intermediate_size"]}
    more |= {"layer_types": ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2), "swiglu_limit": 7.0}
    more |= {"rope_parameters": yarn | {"original_max_position_embeddings": 4096}}
    return {name: value for name, value in config.items() if name != "num_experts"} | more


_TINY, _LARGE, _EXPERTS = (256, 2, 4, 2, 64, 512, 1024), (4096, 36, 32, 8, 128, 12288, 151936), (2048, 16, 32, 4, 128, 6144, 151936)
MODELS = {
    "tiny": _qwen3(_TINY),
    "tiny-moe": _qwen3(_TINY, experts=8, expert=256),
    "tiny-fp8": _qwen3(_TINY, fp8=True),
    "dense-1.7b": _qwen3((2048, 28, 16, 8, 128, 6144, 151936)),
    "dense-8b": _qwen3(_LARGE),
    "moe-10b": _qwen3(_EXPERTS, experts=128, expert=768),
    "fp8-8b": _qwen3(_LARGE, fp8=True),
}
MODELS["tiny-mla"] = _mla(MODELS["tiny"], 16)
MODELS["tiny-gpt-oss"] = _gpt_oss(MODELS["tiny-moe"])
MODELS["tiny-fp8-channel"] = {**MODELS["tiny"], RECIPE: "fp8-channel"}
for _recipe in ("mxfp4", "nvfp4", "int4"):
    MODELS[f"tiny-{_recipe}"] = {**_qwen3(_TINY), RECIPE: _recipe}
    MODELS[f"tiny-moe-{_recipe}"] = {**_qwen3(_TINY, experts=8, expert=256), RECIPE: _recipe}


def new_state(config: Config) -> State:
    """Return random weights. They are cut from a pool of noise, which is much faster than drawing billions of numbers.

    If the configuration has a recipe, the weights are quantised, and the configuration gets their `quantization_config`.
    """
    noise = (0.02 * np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32)).astype(_BF16)

    def make(item: tuple[int, tuple[str, tuple[int, ...]]]) -> State:
        number, (name, shape) = item
        rng = np.random.default_rng([0, number])
        flat = np.empty(int(np.prod(shape)), _BF16)
        if "norm" in name:
            return {name: (1 + 0.1 * rng.standard_normal(flat.size)).astype(_BF16).reshape(shape)}
        at = 0
        while at < flat.size:
            start = int(rng.integers(0, noise.size))
            part = noise[start : start + flat.size - at]
            flat[at : at + part.size] = part
            at += part.size
        if "quantization_config" not in config or "_proj" not in name:
            return {name: flat.reshape(shape)}
        scale = np.float32(0.1 / 448)
        grid = tuple(-(-extent // 128) for extent in shape)
        scales = (scale * (1 + 0.1 * rng.random(grid, dtype=np.float32))).astype(np.float32)
        return {name: np.clip(flat.astype(np.float32) / scale, -448, 448).astype(_F8).reshape(shape), f"{name}_scale_inv": scales}

    state: State = {}
    for part in _POOL.map(make, enumerate(sorted(_shapes(config).items()))):
        state |= part
    if RECIPE in config:
        config["quantization_config"] = QuantisedLayout.of_state(config[RECIPE], state).quantization_config()
        state = quantise_state(state, config[RECIPE])
    if config["model_type"] == "gpt_oss":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        state = _gpt_oss_mxfp4(state)
    return dict(sorted(state.items()))


def _gpt_oss_mxfp4(state: State) -> State:
    """Return the weights of experts as gpt-oss has them: two codes of 4 bits in a byte, and an exponent for each 32 weights."""
    found: State = {}
    steps = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)  # half-way between the magnitudes of mxfp4
    for name, tensor in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = tensor
            continue
        blocks = tensor.astype(np.float32).reshape(*tensor.shape[:2], -1, 32)
        exponents = np.floor(np.log2(np.abs(blocks).max(axis=-1))) - 2
        scaled = blocks / np.exp2(exponents)[..., None]
        codes = np.searchsorted(steps, np.abs(scaled)) | (8 * np.signbit(scaled))
        found[f"{name}_blocks"] = (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
        found[f"{name}_scales"] = (exponents + 127).astype(np.uint8)
    return found


def train(state: State, density: float, seed: int) -> None:
    """Change the last bit of a share of the elements of each tensor, at random places. Shapes and scales of whole tensors stay."""

    def change(item: tuple[int, str]) -> None:
        number, name = item
        if name.endswith(("_shape", "_global_scale")):
            return
        flat = state[name].reshape(-1)
        bits = flat.view(f"u{flat.dtype.itemsize}")
        where = np.random.default_rng([seed, number]).integers(0, bits.size, max(1, int(bits.size * density)))
        values = bits[where] ^ bits.dtype.type(1)
        if flat.dtype == _F8:  # no NaN
            values = np.where((values & 0x7F) == 0x7F, bits[where], values)
        bits[where] = values

    list(_POOL.map(change, enumerate(state)))


def save(folder: Path, config: Config, state: State) -> Path:
    """Write a checkpoint in shards, side by side. Returns the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = ["<eos>", *(f"w{number}" for number in range(1023))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        if size and size + tensor.nbytes > _SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes

    def write(number: int) -> dict[str, str]:
        file, at = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors", 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name in groups[number]:
            tensor = state[name]
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
            at += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as output:
            output.write(len(text).to_bytes(8, "little") + text)
            for name in groups[number]:
                output.write(state[name].reshape(-1).view(np.uint8).data)
        return dict.fromkeys(groups[number], file)

    files: dict[str, str] = {}
    for part in _POOL.map(write, range(len(groups))):
        files |= part
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def expected_hashes(state: State) -> dict[str, str]:
    """Return hashes of the parameters that a vLLM worker should hold, worked out without vLLM. Its fused layers are concatenations."""
    held: dict[str, list[Any]] = {}
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    experts: dict[tuple[str, int, str], Any] = {}
    order = {"k_proj": 1, "up_proj": 1, "v_proj": 2}
    for name in sorted(state, key=lambda name: max(order.get(part, 0) for part in name.split("."))):
        module, layer, kind = f".{name}".rsplit(".", 2)
        module = module.removeprefix(".")
        base, _, number = module.rpartition(".")
        if number.isdigit() and base.endswith(".experts"):
            experts[base, int(number), layer] = state[name]
        else:
            held.setdefault(f"{module}.{fused.get(layer, layer)}.{kind}".removeprefix("."), []).append(state[name])
    for base, number, layer in sorted(experts, key=lambda key: (key[1], ("gate_proj", "up_proj", "down_proj").index(key[2]))):
        place = "w2_weight" if layer == "down_proj" else "w13_weight"
        held.setdefault(f"{base}.routed_experts.{place}", []).append(experts[base, number, layer])

    def digest(item: tuple[str, list[Any]]) -> tuple[str, str]:
        found = hashlib.sha256()
        for part in item[1]:
            found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        return item[0], found.hexdigest()[:16]

    return dict(_POOL.map(digest, held.items()))


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, head, vocabulary = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    found["model.norm.weight"] = (hidden,)
    experts = config.get("num_experts", 0)
    kind = config["model_type"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}self_attn.q_norm.weight": (head,),
            f"{prefix}self_attn.k_norm.weight": (head,),
        }
        if kind == "deepseek_v2":
            found = {name: shape for name, shape in found.items() if not name.startswith(f"{prefix}self_attn.")} | _mla_shapes(
                config, prefix
            )
        if kind == "gpt_oss":
            found = {name: shape for name, shape in found.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
            found |= _gpt_oss_shapes(config, prefix)
            continue
        inner = [(f"{prefix}mlp.experts.{number}.", config["moe_intermediate_size"]) for number in range(experts)]
        for place, width in inner or [(f"{prefix}mlp.", config["intermediate_size"])]:
            found |= {f"{place}gate_proj.weight": (width, hidden), f"{place}up_proj.weight": (width, hidden)}
            found[f"{place}down_proj.weight"] = (hidden, width)
        if experts:
            found[f"{prefix}mlp.gate.weight"] = (experts, hidden)
    return found


def _mla_shapes(config: Config, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"], config["q_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        f"{prefix}self_attn.q_a_proj.weight": (rank, hidden),
        f"{prefix}self_attn.q_a_layernorm.weight": (rank,),
        f"{prefix}self_attn.q_b_proj.weight": (heads * (nope + rope), rank),
        f"{prefix}self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        f"{prefix}self_attn.kv_a_layernorm.weight": (latent,),
        f"{prefix}self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
        f"{prefix}self_attn.o_proj.weight": (hidden, heads * value),
    }


def _gpt_oss_shapes(config: Config, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{prefix}self_attn.sinks": (heads,),
        f"{prefix}self_attn.q_proj.bias": (heads * config["head_dim"],),
        f"{prefix}self_attn.k_proj.bias": (keys,),
        f"{prefix}self_attn.v_proj.bias": (keys,),
        f"{prefix}self_attn.o_proj.bias": (hidden,),
        f"{prefix}mlp.router.weight": (experts, hidden),
        f"{prefix}mlp.router.bias": (experts,),
        f"{prefix}mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        f"{prefix}mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
        f"{prefix}mlp.experts.down_proj": (experts, hidden, inner),
        f"{prefix}mlp.experts.down_proj_bias": (experts, hidden),
    }
