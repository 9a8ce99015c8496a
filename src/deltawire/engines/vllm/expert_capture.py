"""Records routed experts in a worker of vLLM's CPU build, which refuses `--enable-return-routed-experts`.

    POST /collective_rpc {"method": "deltawire_capture_experts"}                  once: hooks on the routers of the model
    POST /inference/v1/generate {"request_id": "deltawire-…", …}                  its experts are recorded
    POST /collective_rpc {"method": "deltawire_take_experts", "args": [NAMES]}    fetches them, and forgets them

A step computes some tokens of several requests, one request after the other. The runner's batch says which. A row belongs to the position
of its token in its request. The first row of a position stays: when a token is computed again, after a preemption or a swap, the version
that computed it first made the tokens after it. Before the first token is drawn, the last row stays. Tokens whose keys and values come from
the prefix cache are not computed, and have no rows.
"""

from __future__ import annotations

import base64
import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARK = "deltawire-"
"""The experts of requests whose name begins with this are recorded."""
_NAME = re.compile(r"(?:(\d+)_)?generate-tokens-(deltawire-[0-9a-f]{32})(?:-[0-9a-f]{8})?")
_MOST_REQUESTS = 4096
_MOST_BYTES = 1 << 30
"""Requests whose rows nobody fetched, such as aborted ones, are forgotten if there are more, or if they are larger. The oldest go first."""


class ExpertCapture:
    """The experts of the requests of one worker.

    Parameters
    ----------
    runner
        The worker's model runner.
    runners
        The MoE layers of the model, with `layer_id` and `router`.
    """

    def __init__(self, runner: Any, runners: Sequence[Any]) -> None:
        self._runner = runner
        self.layers = sorted({int(each.layer_id) for each in runners})
        """The numbers of the layers that have experts."""
        self._step: dict[int, NDArray[np.int16]] | None = None
        self._requests: OrderedDict[str, _Rows] = OrderedDict()
        self._bytes = 0
        for each in runners:
            each.router.set_capture_fn(functools.partial(self._note, int(each.layer_id)))
        runner.execute_model = self._recording(runner.execute_model)

    def take(self, name: str) -> dict[str, Any] | None:
        """Return the experts of a request [tokens, layers, top k], −1 where nothing was recorded, and forget them.

        Parameters
        ----------
        name
            The index of the completion, "/", and the `request_id` of the request.
        """
        rows = self._requests.pop(name, None)
        if rows is None:
            return None
        self._bytes -= rows.nbytes
        return {"shape": list(rows.experts.shape), "data": base64.b64encode(rows.experts.astype("<i2").tobytes()).decode()}

    def _note(self, layer: int, experts: Any) -> None:
        if self._step is not None:
            self._step[layer] = experts.detach().to("cpu").numpy().astype(np.int16)

    def _recording(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def recorded(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._step = {}
            try:
                answer = execute(scheduled, *args, **kwargs)
                if len(self._step) == len(self.layers):
                    self._assign(scheduled)
                return answer
            finally:
                self._step = None

        return recorded

    def _assign(self, scheduled: Any) -> None:
        """Give the rows of a step to its requests."""
        assert self._step is not None
        rows = np.stack([self._step[layer] for layer in self.layers], 1)
        batch, first = self._runner.input_batch, 0
        for index, request in enumerate(batch.req_ids):
            count = int(scheduled.num_scheduled_tokens[request])
            named = _NAME.fullmatch(request)
            if named is not None:
                name = f"{named[1] or 0}/{named[2]}"
                own = self._requests.setdefault(name, _Rows(rows.shape[1:]))
                self._requests.move_to_end(name)
                self._bytes -= own.nbytes
                own.add(int(batch.num_computed_tokens_cpu[index]), rows[first : first + count], prompt=int(batch.num_prompt_tokens[index]))
                self._bytes += own.nbytes
            first += count
        while len(self._requests) > _MOST_REQUESTS or (self._bytes > _MOST_BYTES and len(self._requests) > 1):
            self._bytes -= self._requests.popitem(last=False)[1].nbytes


class _Rows:
    """The rows of one request."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._memory = np.full((0, *shape), -1, np.int16)
        self._length = 0

    @property
    def experts(self) -> NDArray[np.int16]:
        """The rows of all tokens up to the last one that was computed; −1 where there are none."""
        return self._memory[: self._length]

    @property
    def nbytes(self) -> int:
        """The bytes that the rows take."""
        return self._memory.nbytes

    def add(self, start: int, rows: NDArray[np.int16], *, prompt: int) -> None:
        end = start + len(rows)
        if start < self._length < prompt:  # it is computed again, maybe by other weights, and no token was drawn yet
            self._memory[:] = -1
            self._length = 0
        if end > len(self._memory):
            more = np.full((2 * end - len(self._memory), *self._memory.shape[1:]), -1, np.int16)
            self._memory = np.concatenate([self._memory, more])
        if end > self._length:
            new = max(start, self._length)
            self._memory[new:end] = rows[new - start :]
            self._length = end


def capture_experts(worker: Any) -> str | None:
    """Begin to record in this worker. Return why that is not possible, or None.

    Parameters
    ----------
    worker
        vLLM's worker.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    runner = worker.model_runner
    if getattr(worker, "deltawire_expert_capture", None) is not None:
        return None
    if getattr(runner, "speculative_config", None) is not None:
        return "the server uses speculative decoding, so tokens that it rejects would have rows"
    runners = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
    if not runners:
        return "the model has no experts"
    if not all(hasattr(each.router, "set_capture_fn") and not each._quant_method.is_monolithic for each in runners):
        return "the server's kernels choose the experts themselves, so nothing can record them"
    worker.deltawire_expert_capture = ExpertCapture(runner, runners)
    return None


def take_experts(worker: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the experts of requests by name, and forget them. Requests without any are left out.

    Parameters
    ----------
    worker
        vLLM's worker.
    names
        The names of the requests, as for `ExpertCapture.take`.
    """
    capture = getattr(worker, "deltawire_expert_capture", None)
    found = {} if capture is None else {name: capture.take(name) for name in names}
    return {name: rows for name, rows in found.items() if rows is not None}
