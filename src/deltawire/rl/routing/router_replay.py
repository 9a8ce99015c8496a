"""Replay recorded routing in an MoE model, so that the trainer uses the experts that the engine used.

>>> with RouterReplay(model) as replay:
...     replay.set(experts, attention)       # the experts of each token of this micro-batch, −1 where none were recorded
...     loss = compute_loss(model(input_ids, attention_mask=attention))
...     loss.backward()                      # before the next `set`

The experts are replaced, and nothing else is: their weights come from the trainer's own logits, so gradients reach the router.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UnsupportedRouting, UnusableRouting
from .replayed_rows import Moment, ReplayedRows
from .router_weights import Weighting, known_weighting

NO_EXPERT = -1
"""Stands in a row of experts where nothing was recorded."""

Experts: TypeAlias = NDArray[Any] | torch.Tensor
_LARGEST = int(np.iinfo(np.int32).max)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """Counts of decisions since they were last taken. A decision is the choice of experts for one token in one layer."""

    replayed: int
    """Decisions that were replaced by recorded ones."""
    differing: int
    """Replayed decisions for which the model itself would have chosen other experts."""
    unrecorded: int
    """Decisions without a record, for which the model chose."""
    damaged: int
    """Decisions whose record names an expert twice, for which the model chose. Some engines return such rows by mistake."""


class RouterReplay:
    """Replaces the experts that the routers of a transformers model choose. It also records them.

    The model names its router class itself (`_can_record_outputs`). Raises `UnsupportedRouting` if it names none, or if replaying a
    router's own choice would not give exactly its own output. Use it as a context manager, or call `close`.

    Parameters
    ----------
    model
        A model of transformers, also under FSDP2 or DDP.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._routers: list[_Router] = []
        known: dict[tuple[object, ...], tuple[Weighting, int, int]] = {}
        for name, module in _named_routers(model):
            layer = _LAYER.search(name)
            if layer is None:
                raise UnsupportedRouting(f"the router {name!r} is in no numbered layer.")
            kind = (type(module), *((key, value) for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))))
            if kind not in known:
                known[kind] = known_weighting(module, name)
            self._routers.append(_Router(module, int(layer[1]), *known[kind]))
        shapes = {(each.experts, each.top_k) for each in self._routers}
        if len(shapes) != 1 or len({each.layer for each in self._routers}) != len(self._routers):
            raise UnsupportedRouting("the routers of the model have different numbers of experts, or two of them are in one layer.")
        ((self.experts, self.top_k),) = shapes
        self.layers = tuple(each.layer for each in self._routers)
        """The numbers of the layers that have routers, in order."""
        self.all_layers = _number_of_layers(model)
        """The number of all decoder layers; 0 if the model does not say it."""
        self._rows: ReplayedRows | None = None
        self._since = Moment()
        self._recordings: list[Recording] = []
        self._counted: dict[torch.device, torch.Tensor] = {}  # on the device, because reading it would wait for the device
        self._unrecorded = self._damaged = 0
        self._hooks = [each.module.register_forward_hook(self._hook(index)) for index, each in enumerate(self._routers)]

    def set(self, experts: Experts, attention: torch.Tensor | NDArray[Any] | None = None) -> None:
        """Replay these experts until the next `set` or `clear`. Nothing changes if an error is raised.

        If activations are checkpointed, call `backward` before the next `set` or `clear`, because the layers run again then. Otherwise that
        backward pass raises `UnusableRouting`.

        Parameters
        ----------
        experts
            The experts as integers, with the shape [..., layers, top k]. The dimensions before are those of the tokens in the model's
            input: [rows, columns] for a padded batch, [tokens] for a packed one. The layers are those with routers, or all layers. A row
            with −1 is a decision that was not recorded.
        attention
            The attention mask of the input. Tokens that it leaves out are not counted, and keep the model's own routing.
        """
        self._check_open()
        checked = self.check(experts)
        tokens = checked.shape[0]
        counts = np.ones(tokens, np.bool_)
        if attention is not None:
            kept = (attention != 0).cpu().numpy() if isinstance(attention, torch.Tensor) else np.asarray(attention)
            counts = kept.reshape(-1).astype(np.bool_)
            if len(counts) != tokens:
                raise UnusableRouting(f"there are experts for {tokens:,} tokens, but the attention mask has {len(counts):,}.")
            shape = tuple(np.shape(experts)[:-2])
            if len(shape) == kept.ndim > 1 and shape != kept.shape:
                raise UnusableRouting(
                    f"there are experts for {list(shape)} tokens, but the attention mask has the shape {list(kept.shape)}."
                )
        unrecorded: NDArray[np.bool_] = (checked < 0).max(-1)
        ordered = np.sort(checked, -1)
        damaged: NDArray[np.bool_] = (ordered[..., 1:] == ordered[..., :-1]).max(-1, initial=False) & ~unrecorded
        self._unrecorded += int(unrecorded[counts].sum())
        self._damaged += int(damaged[counts].sum())
        rows = np.where((unrecorded | damaged | ~counts[:, None])[..., None], NO_EXPERT, checked)
        kind = np.int16 if self.experts <= 1 << 15 else np.int32
        self._change(ReplayedRows(torch.from_numpy(np.ascontiguousarray(rows.transpose(1, 0, 2), kind)), len(self._routers)))

    def clear(self) -> None:
        """Let the model choose again. Call `backward` before, as for `set`."""
        if self._rows is not None:
            self._change(None)

    def check(self, experts: Experts) -> NDArray[np.int32]:
        """Return experts as an array [tokens, layers with routers, top k]. Raises `UnusableRouting` if they do not fit the model.

        Parameters
        ----------
        experts
            As for `set`.
        """
        array = _integers(experts)
        if array.shape[-1] != self.top_k:
            raise UnusableRouting(f"{array.shape[-1]} experts per token were recorded, but the model chooses {self.top_k}.")
        array = array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])
        if array.shape[1] == self.all_layers != len(self.layers):
            array = array[:, list(self.layers)]
        if array.shape[1] != len(self.layers):
            raise UnusableRouting(f"{array.shape[1]} layers were recorded, but {len(self.layers)} layers of the model have routers.")
        if array.size and (int(array.min()) < NO_EXPERT or int(array.max()) >= self.experts):
            raise UnusableRouting(f"experts from {array.min()} to {array.max()} were recorded, but the model has {self.experts}.")
        return array.astype(np.int32)

    def check_replayed(self) -> None:
        """Raise `UnusableRouting` if a router has not run since `set`.

        A fused kernel may run in its place, or code that was compiled before this object put its hooks on the model.
        """
        if self._rows is not None and (idle := [each.layer for each, ran in zip(self._routers, self._rows.ran, strict=True) if not ran]):
            raise UnusableRouting(
                f"the router of layer {idle[0]} did not run, so nothing was replayed there.",
                hint="Load the model without kernels from the hub, and make the RouterReplay before a compiled model first runs.",
            )

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the experts of every forward pass in the context, including replayed ones."""
        self._check_open()
        recording = Recording(len(self._routers))
        self._recordings.append(recording)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)

    def take_counts(self) -> ReplayCounts:
        """Return what was replayed since the last call. Layers that run again for checkpointed activations are counted once."""
        replayed, differing = np.sum([[0, 0], *(each.tolist() for each in self._counted.values())], axis=0)
        counts = ReplayCounts(int(replayed), int(differing), self._unrecorded, self._damaged)
        self._counted, self._unrecorded, self._damaged = {}, 0, 0
        return counts

    def close(self) -> None:
        """Remove the hooks from the model. A second call does nothing. `set` and `record` raise `UnusableRouting` from then on.

        Call `backward` before: without hooks, layers that run again for checkpointed activations let the model choose.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._rows = None

    def __enter__(self) -> RouterReplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._hooks:
            raise UnusableRouting("this RouterReplay is closed, so it replays and records nothing.", hint="Make another one for the model.")

    def _change(self, rows: ReplayedRows | None) -> None:
        self._rows, self._since = rows, Moment()

    def _hook(self, index: int) -> Any:
        own = self._routers[index].module

        def hook(module: torch.nn.Module, args: tuple[Any, ...], out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
            if module is not own and not getattr(module, "_is_replica", False):
                return None  # a deep copy of the model takes the hooks along; DataParallel's replicas are the model itself
            return self._routed(index, args[0], out)

        return hook

    def _routed(self, index: int, hidden: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
        logits, weights, own = out
        chosen, rows = own, self._rows
        runs_again = torch._C._current_graph_task_id() != -1  # in a backward pass, for a checkpointed layer
        if runs_again:
            self._since.check_began_later()
        elif not torch.compiler.is_compiling():  # the compiler cannot trace it
            self._since.see_forward()
        if rows is not None:
            wanted = rows.of(index, own, runs_again)
            missing = (wanted < 0).any(-1, keepdim=True)
            same = (wanted.sort(-1).values == own.sort(-1).values).all(-1, keepdim=True)
            chosen = torch.where(missing | same, own, wanted)  # the order of equal sets is the model's own, so sums are rounded as there
            weights = self._routers[index].weighting(self._routers[index].module, logits, chosen, hidden)
            if not runs_again:
                counted = torch.stack([(~missing).sum(), (~missing & ~same).sum()])
                self._counted[own.device] = counted + self._counted.get(own.device, 0)
        if not runs_again:
            for recording in self._recordings:
                recording.add(index, chosen)
        return None if rows is None else (logits, weights, chosen)


class Recording:
    """The experts of forward passes, as `RouterReplay.record` records them.

    Parameters
    ----------
    layers
        The number of layers with routers.
    """

    def __init__(self, layers: int) -> None:
        self._passes: list[list[torch.Tensor]] = [[] for _ in range(layers)]

    def add(self, index: int, experts: torch.Tensor) -> None:
        """Note the experts of a forward pass. The hooks of `RouterReplay` call it.

        Parameters
        ----------
        index
            The index of the layer among those with routers.
        experts
            Its experts, [tokens, top k].
        """
        self._passes[index].append(experts.detach())

    def take(self) -> NDArray[np.int32]:
        """Return the experts [tokens, layers with routers, top k] of all forward passes since the last call, one after the other."""
        passes, self._passes = self._passes, [[] for _ in self._passes]
        if not any(passes):
            raise UnusableRouting(
                "nothing was recorded, because the model has not run.", hint="Run the model in the context of record first."
            )
        if any([len(one) for one in each] != [len(one) for one in passes[0]] for each in passes):
            raise UnusableRouting(
                "some routers did not process all tokens, because a forward pass failed half-way, or a fused kernel ran in place of one.",
                hint="Run the model again, and load it without kernels from the hub.",
            )
        whole = torch.stack([torch.cat(each) for each in passes], 1)
        return np.asarray(whole.to(device="cpu", dtype=torch.int32), np.int32)


def lay_out(sequences: Sequence[Experts | None], attention: torch.Tensor) -> torch.Tensor | None:
    """Return the experts [rows, columns, layers, top k] of a padded batch, or None if no sequence has any.

    Raises `UnusableRouting` if the experts of a sequence are not as many as its tokens, or if sequences have different shapes.

    Parameters
    ----------
    sequences
        The experts [tokens, layers, top k] of each row of the batch. None for a row without any.
    attention
        The attention mask [rows, columns], with padding on any side.
    """
    if attention.ndim != 2 or len(attention) != len(sequences):
        raise UnusableRouting(
            f"there are experts of {len(sequences)} sequences, but the attention mask has the shape {list(attention.shape)}."
        )
    found = [None if each is None else _integers(each) for each in sequences]
    shapes = {each.shape[1:] for each in found if each is not None}
    if not shapes:
        return None
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise UnusableRouting(f"sequences of one batch have experts of the shapes {sorted(shapes)}.")
    whole = np.full((*attention.shape, *next(iter(shapes))), NO_EXPERT, np.int32)
    for row, each in enumerate(found):
        if each is not None:
            here = (attention[row] != 0).cpu().numpy()
            if int(here.sum()) != len(each):
                raise UnusableRouting(f"a sequence has {int(here.sum()):,} tokens, but the experts of {len(each):,} were recorded.")
            if each.size and (int(each.min()) < NO_EXPERT or int(each.max()) > _LARGEST):
                raise UnusableRouting(f"experts from {each.min()} to {each.max()} were recorded, which no model has.")
            whole[row, here] = each
    return torch.from_numpy(whole)


def _integers(experts: Experts) -> NDArray[Any]:
    """Return experts as an array [..., layers, top k] of integers of any type. Raises `UnusableRouting` if they are none."""
    try:
        array = experts.detach().cpu().numpy() if isinstance(experts, torch.Tensor) else np.asarray(experts)
    except (TypeError, ValueError, RuntimeError) as error:  # a type that numpy does not have, such as bfloat16, or rows of unequal lengths
        raise UnusableRouting(f"experts are integers [tokens, layers, top k], but these are not an array of integers ({error}).") from error
    if array.dtype.kind not in "iu" or array.ndim < 3:
        raise UnusableRouting(f"experts are integers [tokens, layers, top k], not {array.dtype} with the shape {list(array.shape)}.")
    return array


@dataclass(slots=True, eq=False)
class _Router:
    module: torch.nn.Module
    layer: int
    weighting: Weighting
    experts: int
    top_k: int


def _number_of_layers(model: torch.nn.Module) -> int:
    """Return the number of all decoder layers, or 0 if the model does not say it."""
    config = next((module.config for module in model.modules() if hasattr(getattr(module, "config", None), "get_text_config")), None)
    return 0 if config is None else int(getattr(config.get_text_config(), "num_hidden_layers", 0) or 0)


def _named_routers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the routers in the order of their layers."""
    recorders: list[Any] = []
    for module in model.modules():
        named = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if named is not None and named not in recorders:
            recorders.append(named)
    if not recorders:
        raise UnsupportedRouting(f"{type(model).__name__} names no router class, so it is no MoE model that transformers can record.")
    if len(recorders) != 1 or getattr(recorders[0], "index", None) != 0 or not isinstance(recorders[0].target_class, type):
        raise UnsupportedRouting(f"{type(model).__name__} returns its routing in a form that deltawire does not know.")
    kind, part = recorders[0].target_class, recorders[0].layer_name or ""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, kind) and part in name]
    if not found:
        raise UnsupportedRouting(f"{type(model).__name__} has no layer with a router.")
    return found
