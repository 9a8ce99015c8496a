"""GRPO with a mixture of experts: a vLLM server and a transformers model make the rollouts, and the trainer replays their experts.

    python examples/moe_grpo/run.py [--steps 20]

It takes a few minutes on two cores. A small Qwen3-MoE is made, and vLLM's CPU build serves it. Both members record which experts
processed each token. At the end, a table shows the mismatch of trainer and engines on the same tokens, without and with replay.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import mismatch  # noqa: E402
import tiny_moe  # noqa: E402
import train  # noqa: E402
from local_processes import free_port, kill, print_logs, start, start_vllm, wait_for  # noqa: E402


def main(steps: int, folder: Path, store: str, server: str | None) -> None:
    model = folder / "model"
    processes = []
    try:
        if not model.exists():
            tiny_moe.save(model)
        if server is None:
            port = free_port()
            server = f"http://127.0.0.1:{port}"
            print("starting vLLM", flush=True)
            processes.append(start_vllm(folder / "vllm-server.log", model, port, "--logprobs-mode", "processed_logprobs"))
            wait_for(f"{server}/health", processes[-1])
        warm_up(server)
        engines = {"vllm": f"vllm={server}", "transformers": "transformers"}
        for name, engine in engines.items():
            command = ["-m", "deltawire.cli", "member", "--from", store, "--engine", engine, "--name", name, "--poll", "0.1"]
            command += ["--env", "low_words:low_words", "--routing"]
            processes.append(start(folder / f"{name}.log", command, {"HF_HUB_OFFLINE": "1"}, HERE))
        trained = train.train(model, store, steps, set(engines))
        print(f"\nThe trained model is in {trained}, and vLLM serves it. The rollouts of all steps:\n", flush=True)
        mismatch.print_table(mismatch.measure(store))
    except BaseException:
        print_logs(folder)
        raise
    finally:
        kill(reversed(processes))


def warm_up(server: str) -> None:
    """Let the server make a completion, because the first one takes seconds, and the trainer would take vLLM for slow."""
    model = httpx.get(f"{server}/v1/models", timeout=60, trust_env=False).raise_for_status().json()["data"][0]["id"]
    request = {"model": model, "prompt": [1, 2], "max_tokens": 4}
    httpx.post(f"{server}/v1/completions", json=request, timeout=300, trust_env=False).raise_for_status()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="the number of training steps")
    parser.add_argument("--folder", type=Path, help="the folder for the model and the logs; by default a new one")
    parser.add_argument("--store", metavar="URL", help="the store of trainer and members, such as s3://BUCKET/PREFIX; by default a folder")
    parser.add_argument("--server", metavar="URL", help="a vLLM server that runs already, with the model of the folder")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="deltawire-example-"))
    main(given.steps, folder, given.store or str(folder / "store"), given.server)
