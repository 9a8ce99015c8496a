"""Measures how far engines are from the trainer, without and with replay, on the rollouts that are still in the store.

    python examples/moe_grpo/mismatch.py STORE

Each rollout is computed again with the weights of the version that made it: in float32, as the trainer computes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.fleet.overview import FleetReader
from deltawire.format.rollouts import Rollouts
from deltawire.rl.batches import TrainingBatch, training_batch
from deltawire.rl.generation import build_model
from deltawire.rl.grpo import token_logprobs
from deltawire.rl.mismatch import Mismatch, TokenMismatch
from deltawire.rl.routing.router_replay import RouterReplay
from deltawire.store import Store, open_store
from deltawire.subscribe.model_files import read_model_files

READING = ReaderOptions(pin=False)


@dataclass
class Measured:
    """The mismatch of one member."""

    decisions: int = 0
    differing: int = 0
    without: list[TokenMismatch] = field(default_factory=list)
    replayed: list[TokenMismatch] = field(default_factory=list)


def measure(url: str) -> dict[str, Measured]:
    """Return the mismatch by member. Rollouts without experts, and those that several versions made, are left out."""
    found: dict[str, Measured] = defaultdict(Measured)
    with open_store(url) as store:
        made: dict[tuple[int, str], list[Rollouts]] = defaultdict(list)
        for each in accepted(store):
            if each.routing is not None and len(each.versions) == 1:
                made[next(iter(each.versions)), each.member].append(each)
        files = read_model_files(store)
        served, trainer = build_model(files)[0], build_model(files)[0].float()
        with HotSwap(store, ModuleEngine(served), options=READING) as policy, RouterReplay(trainer) as replay:
            for (seq, member), results in sorted(made.items(), key=lambda item: item[0]):
                policy.sync(seq=seq)
                trainer.load_state_dict(served.state_dict())
                batch = training_batch(results, for_step=results[0].versions[seq].step + 1, check_experts=replay.check)
                assert batch.experts is not None
                replay.clear()
                found[member].without.append(compare(trainer, batch))
                replay.set(batch.experts, batch.attention)
                found[member].replayed.append(compare(trainer, batch))
                counts = replay.take_counts()
                found[member].decisions += counts.replayed
                found[member].differing += counts.differing
    return found


def accepted(store: Store) -> Iterator[Rollouts]:
    """Yield the results that the trainer has accepted, and that it has not deleted yet."""
    with FleetReader(store, READING.open_log(store).run.id) as reader:
        for seen in reader.results():
            if seen.state == "accepted" and (rollouts := reader.read(seen)) is not None:
                yield rollouts


@torch.no_grad()
def compare(trainer: torch.nn.Module, batch: TrainingBatch) -> TokenMismatch:
    drift = (token_logprobs(trainer, batch.ids, batch.attention) - batch.behaviour)[batch.mask].double().numpy()
    return TokenMismatch(drift, np.zeros(len(drift), np.bool_), batch.lags[batch.mask].numpy(), np.zeros(len(drift), np.int64))


def print_table(found: dict[str, Measured]) -> None:
    form = "{:<14} {:>7} {:>22} {:>10} {:>12} {:>12} {:>12}"
    print(form.format("member", "tokens", "decisions that differ", "k3 KL", "with replay", "max |Δlogp|", "with replay"))
    for member, each in sorted(found.items()):
        own, replayed = total(each.without), total(each.replayed)
        numbers = (own.kl, replayed.kl, own.logp_difference_max, replayed.logp_difference_max)
        share = f"{each.differing / each.decisions:.2%}"
        print(form.format(member, own.tokens, share, *(f"{number:.2e}" for number in numbers)), flush=True)


def total(parts: list[TokenMismatch]) -> Mismatch:
    mismatch = TokenMismatch.join(parts).measure()
    assert mismatch is not None
    return mismatch


if __name__ == "__main__":
    print_table(measure(sys.argv[1]))
