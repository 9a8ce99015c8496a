"""Checkpoints of tiny models, and vLLM's layout of them in memory, computed without any code of vLLM."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

State = dict[str, np.ndarray[Any, Any]]

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, EXPERT = 256, 64, 4, 2, 32, 128, 64
LATENT, ROPE = 512, 64
"""The sizes of MLA's compressed keys and values, and of their part with positions. vLLM's kernel for CPUs has no others."""


@dataclass(frozen=True)
class TinyModel:
    """A model of the Qwen3 family with random weights. It is dense if `experts` is 0. `scale` makes it wider, and `expert` its experts."""

    name: str
    experts: int = 0
    tied: bool = False
    scale: int = 1
    layers: int = 2
    expert: int = EXPERT

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "dtype": "bfloat16",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN * self.scale,
            "intermediate_size": INNER * self.scale,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS * self.scale,
            "num_key_value_heads": KV_HEADS * self.scale,
            "head_dim": HEAD,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }
        if self.experts:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": self.expert * self.scale,
                "decoder_sparse_step": 1,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
            }
        return config

    def state(self, seed: int = 0) -> State:
        """Return weights by their names in a checkpoint, in bf16."""
        hidden, queries, keys = HIDDEN * self.scale, HEADS * HEAD * self.scale, KV_HEADS * HEAD * self.scale
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
        if not self.tied:
            shapes["lm_head.weight"] = (VOCABULARY, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                f"{prefix}input_layernorm.weight": (hidden,),
                f"{prefix}post_attention_layernorm.weight": (hidden,),
                f"{prefix}self_attn.q_proj.weight": (queries, hidden),
                f"{prefix}self_attn.k_proj.weight": (keys, hidden),
                f"{prefix}self_attn.v_proj.weight": (keys, hidden),
                f"{prefix}self_attn.o_proj.weight": (hidden, queries),
                f"{prefix}self_attn.q_norm.weight": (HEAD,),
                f"{prefix}self_attn.k_norm.weight": (HEAD,),
            }
            inner = [(f"{prefix}mlp.experts.{expert}.", self.expert * self.scale) for expert in range(self.experts)] or [
                (f"{prefix}mlp.", INNER * self.scale)
            ]
            for place, width in inner:
                shapes |= {f"{place}gate_proj.weight": (width, hidden), f"{place}up_proj.weight": (width, hidden)}
                shapes[f"{place}down_proj.weight"] = (hidden, width)
            if self.experts:
                shapes[f"{prefix}mlp.gate.weight"] = (self.experts, hidden)
        return _random(shapes, seed, 0.3 / self.scale)

    def save(self, folder: Path, state: State, quantization_config: dict[str, Any] | None = None) -> Path:
        folder.mkdir(parents=True)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        more = {} if quantization_config is None else {"quantization_config": quantization_config}
        (folder / "config.json").write_text(json.dumps({**self.config(), **more}))
        _save_tokenizer(folder)
        return folder


@dataclass(frozen=True)
class TinyFused(TinyModel):
    """A model with experts whose checkpoint has two tensors for all experts of a layer.

    transformers 5 names and shapes them so in a model's `state_dict()`.
    """

    def state(self, seed: int = 0) -> State:
        """Return weights by their names in a checkpoint, in bf16."""
        split = super().state(seed)
        state = {name: tensor for name, tensor in split.items() if ".experts." not in name}
        for layer in range(self.layers):
            place = f"model.layers.{layer}.mlp.experts."
            gates, ups, downs = (
                np.stack([split[f"{place}{expert}.{part}_proj.weight"] for expert in range(self.experts)])
                for part in ("gate", "up", "down")
            )
            state |= {f"{place}gate_up_proj": np.concatenate([gates, ups], axis=1), f"{place}down_proj": downs}
        return state


@dataclass(frozen=True)
class TinyLlama4(TinyModel):
    """A model of the Llama 4 family with random weights. Its checkpoint has two transposed tensors for all experts of a layer."""

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "intermediate_size": self.expert * self.scale,
            "intermediate_size_mlp": INNER * self.scale,
            "num_local_experts": self.experts,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "layer_types": ["full_attention"] * self.layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }

    def state(self, seed: int = 0) -> State:
        """Return weights by their names in a checkpoint, in bf16."""
        hidden, inner = HIDDEN * self.scale, self.expert * self.scale
        shapes = {
            name: tensor.shape
            for name, tensor in super().state(seed).items()
            if ".mlp." not in name and not name.endswith(("q_norm.weight", "k_norm.weight"))
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}.feed_forward."
            shapes |= {
                f"{prefix}router.weight": (self.experts, hidden),
                f"{prefix}experts.gate_up_proj": (self.experts, hidden, 2 * inner),
                f"{prefix}experts.down_proj": (self.experts, inner, hidden),
                f"{prefix}shared_expert.gate_proj.weight": (inner, hidden),
                f"{prefix}shared_expert.up_proj.weight": (inner, hidden),
                f"{prefix}shared_expert.down_proj.weight": (hidden, inner),
            }
        return _random(shapes, seed, 0.3 / self.scale)


@dataclass(frozen=True)
class TinyGptOss(TinyModel):
    """A model of the gpt-oss family with random weights. `gpt_oss_mxfp4` makes a checkpoint of them."""

    def config(self) -> dict[str, Any]:
        yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        return super().config() | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "intermediate_size": self.expert * self.scale,
            "num_local_experts": self.experts,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": ["full_attention"] * self.layers,
            "rope_parameters": yarn | {"original_max_position_embeddings": 512},
            "swiglu_limit": 7.0,
        }

    def state(self, seed: int = 0) -> State:
        """Return weights in bf16, with gates and ups of experts in turns. Scales of mxfp4 come from `gpt_oss_mxfp4`."""
        hidden, inner = HIDDEN * self.scale, self.expert * self.scale
        shapes = {
            name: tensor.shape
            for name, tensor in super().state(seed).items()
            if ".mlp." not in name and not name.endswith(("q_norm.weight", "k_norm.weight"))
        }
        for name, shape in list(shapes.items()):
            if name.endswith("_proj.weight"):
                shapes[name.replace("weight", "bias")] = shape[:1]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                f"{prefix}self_attn.sinks": (HEADS * self.scale,),
                f"{prefix}mlp.router.weight": (self.experts, hidden),
                f"{prefix}mlp.router.bias": (self.experts,),
                f"{prefix}mlp.experts.gate_up_proj": (self.experts, 2 * inner, hidden),
                f"{prefix}mlp.experts.gate_up_proj_bias": (self.experts, 2 * inner),
                f"{prefix}mlp.experts.down_proj": (self.experts, hidden, inner),
                f"{prefix}mlp.experts.down_proj_bias": (self.experts, hidden),
            }
        return _random(shapes, seed, 0.3 / self.scale)


@dataclass(frozen=True)
class TinyMla(TinyModel):
    """A dense model of the DeepSeek-V2 family, with random weights. Its attention is MLA. `query_rank` compresses queries too.

    vLLM serves it with a block size of 16 for the KV cache.
    """

    query_rank: int | None = 128

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": HEADS * self.scale,
            "moe_intermediate_size": EXPERT,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": self.layers,  # so no layer has experts
            "moe_layer_freq": 1,
            "kv_lora_rank": LATENT,
            "q_lora_rank": self.query_rank,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": HEAD,
            "v_head_dim": HEAD,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "aux_loss_alpha": 0.0,
            "seq_aux": True,
        }

    def state(self, seed: int = 0) -> State:
        """Return weights by their names in a checkpoint, in bf16."""
        hidden, heads = HIDDEN * self.scale, HEADS * self.scale
        queries = heads * (HEAD + ROPE)
        shapes = {name: tensor.shape for name, tensor in super().state(seed).items() if ".self_attn." not in name}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}.self_attn."
            if self.query_rank is None:
                shapes[f"{prefix}q_proj.weight"] = (queries, hidden)
            else:
                shapes[f"{prefix}q_a_proj.weight"] = (self.query_rank, hidden)
                shapes[f"{prefix}q_a_layernorm.weight"] = (self.query_rank,)
                shapes[f"{prefix}q_b_proj.weight"] = (queries, self.query_rank)
            shapes |= {
                f"{prefix}kv_a_proj_with_mqa.weight": (LATENT + ROPE, hidden),
                f"{prefix}kv_a_layernorm.weight": (LATENT,),
                f"{prefix}kv_b_proj.weight": (heads * (HEAD + HEAD), LATENT),
                f"{prefix}o_proj.weight": (hidden, heads * HEAD),
            }
        return _random(shapes, seed, 0.3 / self.scale)


@dataclass(frozen=True)
class TinyMtp(TinyModel):
    """A dense model of the Ernie family with random weights. Its checkpoint also has a layer that drafts the next token but one (MTP)."""

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": "ernie4_5_moe",
            "use_bias": False,
            "use_moe": False,  # so no layer has experts
            "moe_num_experts": 2,
            "moe_layer_start_index": self.layers,
            "moe_layer_end_index": self.layers,
            "num_nextn_predict_layers": 1,
        }

    def state(self, seed: int = 0) -> State:
        """Return weights by their names in a checkpoint, in bf16."""
        hidden = HIDDEN * self.scale
        shapes = {name: tensor.shape for name, tensor in super().state(seed).items() if not name.endswith("_norm.weight")}
        first = {name.removeprefix("model.layers.0."): shape for name, shape in shapes.items() if name.startswith("model.layers.0.")}
        shapes |= {f"model.mtp_block.0.{name}": shape for name, shape in first.items()}
        shapes |= {"model.mtp_emb_norm.0.weight": (hidden,), "model.mtp_hidden_norm.0.weight": (hidden,)}
        shapes["model.mtp_linear_proj.0.weight"] = (hidden, 2 * hidden)
        return _random(shapes, seed, 0.3 / self.scale)


def _random(shapes: dict[str, tuple[int, ...]], seed: int, deviation: float) -> State:
    rng = np.random.default_rng(seed)
    return {
        name: (1 + 0.1 * rng.normal(size=shape) if "norm" in name else deviation * rng.normal(size=shape)).astype(ml_dtypes.bfloat16)
        for name, shape in sorted(shapes.items())
    }


def runtime_hashes(state: State, ranks: int) -> dict[str, str]:
    """Return the hashes that vLLM's checker must report for a dense model: each rank's rows and columns, with QKV and gate/up fused."""
    hashes = {}
    for rank in range(ranks):
        held: State = {}
        for name, tensor in state.items():
            stem = name.removesuffix(".weight")
            module, _, kind = stem.rpartition(".")
            if kind in ("q_proj", "gate_proj"):
                parts = ("q_proj", "k_proj", "v_proj") if kind == "q_proj" else ("gate_proj", "up_proj")
                fused = "qkv_proj" if kind == "q_proj" else "gate_up_proj"
                held[f"{module}.{fused}.weight"] = np.concatenate([_rows(state[f"{module}.{part}.weight"], rank, ranks) for part in parts])
            elif kind in ("k_proj", "v_proj", "up_proj"):
                continue
            elif kind in ("o_proj", "down_proj"):
                held[name] = np.split(tensor, ranks, axis=1)[rank]
            elif kind in ("embed_tokens", "lm_head"):
                held[name] = _rows(tensor, rank, ranks)
            else:
                held[name] = tensor
        for name, tensor in held.items():
            hashes[f"dp0:pp0:pcp0:tp{rank}:{name}"] = hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()
    return hashes


def _rows(tensor: np.ndarray[Any, Any], rank: int, ranks: int) -> np.ndarray[Any, Any]:
    return np.split(tensor, ranks, axis=0)[rank]


def train(state: State, rng: np.random.Generator, density: float = 0.02) -> None:
    """Change some elements of every tensor by a few of the last bits, as a small learning rate does."""
    for tensor in state.values():
        bits = tensor.reshape(-1).view(np.uint16)
        where = rng.choice(bits.size, max(1, int(bits.size * density)), replace=False)
        bits[where] ^= rng.integers(1, 64, where.size).astype(np.uint16)


def train_visibly(state: State, rng: np.random.Generator) -> None:
    """Change all weights by enough that their quantised values and scales change."""
    for name, tensor in state.items():
        state[name] = (tensor + 0.01 * rng.standard_normal(tensor.shape)).astype(ml_dtypes.bfloat16)


def fp8_per_tensor(state: State) -> State:
    """Quantise the weights of linear layers to fp8, with one scale each. deltawire's own recipe gives fused weights a common scale."""
    found: State = {}
    for name, tensor in state.items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        scale = np.abs(tensor.astype(np.float32)).max() / np.float32(448)
        found[name] = np.clip(tensor.astype(np.float32) / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        found[f"{name}_scale"] = np.array(scale, np.float32)
    return found


def int8_per_channel(state: State) -> State:
    """Quantise the weights of linear layers to int8, with one scale for each row."""
    found: State = {}
    for name, tensor in state.items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        scale = np.abs(tensor.astype(np.float32)).max(axis=1, keepdims=True) / np.float32(127)
        found[name] = np.rint(tensor.astype(np.float32) / scale).astype(np.int8)
        found[f"{name}_scale"] = scale.astype(ml_dtypes.bfloat16)
    return found


def gpt_oss_mxfp4(state: State) -> State:
    """Quantise the weights of experts to mxfp4: two codes of 4 bits in a byte, and an exponent for each 32 weights."""
    found: State = {}
    steps = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    for name, tensor in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = tensor
            continue
        blocks = tensor.astype(np.float32).reshape(*tensor.shape[:2], -1, 32)
        exponents = np.floor(np.log2(np.abs(blocks).max(axis=-1))) - 2
        scaled = blocks / np.exp2(exponents)[..., None]
        codes = np.abs(np.abs(scaled)[..., None] - steps).argmin(axis=-1) | (8 * np.signbit(scaled))
        found[f"{name}_blocks"] = (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
        found[f"{name}_scales"] = (exponents + 127).astype(np.uint8)
    return found


GPT_OSS_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
"""The `quantization_config` of such a checkpoint."""

INT8_PER_CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
}
"""The `quantization_config` of such a checkpoint."""

FP8_PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
"""The `quantization_config` of such a checkpoint."""


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<eos>", "<|im_start|>", "<|im_end|>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
