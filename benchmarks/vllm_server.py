"""A vLLM server on the CPU of this machine, with a small Qwen3 model of random weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from free_ports import free_port

from deltawire.format.checkpoints.checkpoint import Checkpoint

try:
    from deltawire.engines.vllm.driver.routes import VllmRoutes
except ModuleNotFoundError:  # as in engine_models.py
    from deltawire.engines.vllm.routes import VllmRoutes

State = dict[str, np.ndarray[Any, Any]]

_VOCABULARY = 256
_START_SECONDS = 300
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's fused layers, and the layers of the checkpoint that each of them holds, one after the other."""


def new_model(folder: Path, *, width: int, layers: int, experts: int = 0) -> State:
    """Write a model with random bf16 weights to a checkpoint directory, and return a copy of its weights.

    Parameters
    ----------
    folder
        The directory to write.
    width
        Multiplies the hidden size (64), the intermediate size and the number of heads.
    layers
        The number of layers.
    experts
        The number of experts of each layer, of which each token uses two. 0 makes a dense model.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 64 * width,
        "intermediate_size": 128 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4 * width,
        "num_key_value_heads": 2 * width,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**settings))
    if experts:
        settings |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64 * width, "mlp_only_layers": []}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    model.to(torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(folder)
    saved = Checkpoint(folder)
    return {name: np.array(saved[name]) for name in saved}


def runtime_hashes(state: State) -> dict[str, str]:
    """Return the hash of each tensor that vLLM should hold in its one worker, by the name under which vLLM reports it."""
    held: State = {}
    for name, tensor in state.items():
        module, _, layer = name.removesuffix(".weight").rpartition(".")
        fused = next((each for each, parts in _FUSED.items() if layer in parts), None)
        if fused is None:
            held[name] = tensor
        else:
            held[f"{module}.{fused}.weight"] = np.concatenate([state[f"{module}.{part}.weight"] for part in _FUSED[fused]])
    return {f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest() for name, tensor in held.items()}


class VllmServer:
    """A vLLM server process that uses deltawire's backend for weight transfer.

    Parameters
    ----------
    model
        The checkpoint directory to serve.
    log
        The file for everything that the server prints.
    python_path
        Directories with further vLLM plugins, separated as in PYTHONPATH.
    """

    def __init__(self, model: Path, log: Path, python_path: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.routes = VllmRoutes(self.url)
        self._log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "512"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), "--weight-transfer-config", json.dumps({"backend": "deltawire"})]
        variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": python_path}
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=output, start_new_session=True)

    @property
    def session(self) -> int:
        """The id of the session to which all processes of the server belong."""
        return self._process.pid

    def wait(self) -> None:
        """Return when the server answers. Raise an error that contains the end of its log if it ends, or takes too long."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the vLLM server did not start:\n{self._log.read_text(errors='replace')[-6000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.2)

    def stream(self, prompt: Sequence[int], tokens: int) -> Iterator[int]:
        """Request a completion, and yield the number of tokens in each piece as it arrives."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else []
                if choices and choices[0].get("token_ids"):
                    yield len(choices[0]["token_ids"])

    def kill(self) -> None:
        """End the server and its worker processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    words = ["<eos>", *(f"w{number}" for number in range(1, _VOCABULARY))]
    Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<eos>")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
