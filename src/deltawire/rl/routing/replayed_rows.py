"""The experts that `RouterReplay` replays, and since when: a checkpointed layer must not run again with those of another micro-batch."""

from __future__ import annotations

import threading

import torch

from ...errors import UnusableRouting


class ReplayedRows:
    """The experts [layers, tokens, top k] of one micro-batch, and how often each router has run with them."""

    def __init__(self, experts: torch.Tensor, routers: int) -> None:
        self._experts = experts
        self._copies: dict[torch.device, torch.Tensor] = {}
        self.ran = [0] * routers
        self._ran_again = [0] * routers

    def of(self, index: int, own: torch.Tensor, runs_again: bool) -> torch.Tensor:
        """Return the experts of a layer, on the device and in the type of the router's own choice."""
        if len(own) != self._experts.shape[1]:
            raise UnusableRouting(
                f"there are experts for {self._experts.shape[1]:,} tokens, but the model was given {len(own):,}.",
                hint="Pass one row for each token of the input, padding included, or call clear to let the model choose.",
            )
        if not runs_again:
            self.ran[index] += 1
        else:
            self._ran_again[index] += 1
            if self._ran_again[index] > self.ran[index]:
                raise _too_late()
        if own.device not in self._copies:
            self._copies[own.device] = self._experts.to(own.device)
        return self._copies[own.device][index].to(own.dtype)


class Moment:
    """The time of a change of experts, as autograd counts: it numbers the operations of each thread."""

    def __init__(self) -> None:
        self._operations = torch.autograd._get_sequence_nr()
        self._thread = threading.get_ident()
        self._is_comparable = True

    def see_forward(self) -> None:
        """Note that a forward pass runs on this thread. Numbers of different threads cannot be compared."""
        if threading.get_ident() != self._thread:
            self._is_comparable = False

    def check_began_later(self) -> None:
        """Raise `UnusableRouting` if the operation whose backward pass is running is older: it ran with other experts."""
        node = torch._C._current_autograd_node()
        if self._is_comparable and node is not None and node._sequence_nr() < self._operations:
            raise _too_late()


def _too_late() -> UnusableRouting:
    return UnusableRouting(
        "a checkpointed layer ran again after other experts were set, or after they were cleared.",
        hint="Call backward before the next set or clear.",
    )
