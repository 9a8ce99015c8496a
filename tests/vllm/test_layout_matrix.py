"""Models in all layouts that run on a CPU follow twenty updates in live memory. Then memory and logits are those of a fresh load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from emulated_kernels import requantise_on_cpu
from fake_layout import FakeHop, alone
from layout_cases import CASES, COMPUTED, CONVERTED, UPDATES, Chain, emulate, load_norms_with, stays, table_of, visible, ways
from loaded_models import LoadedModel, import_vllm, load_model, read_checkpoint
from model_logits import logits
from model_memory import addresses, difference, memory
from rank_pair import Job, RankPair
from server_nursery import ServerNursery
from tiny_checkpoints import TinyModel

from deltawire.chain.log import ChainLog
from deltawire.errors import EngineRefused
from deltawire.format.records.version_records import Commit
from deltawire.subscribe.tensor_table import TensorTable, write_table

if TYPE_CHECKING:
    from deltawire.engines.vllm.live.live_weights import LiveWeights

pytestmark = pytest.mark.slow


class Kept:
    """The tensors of a checkpoint on the host, for those that cannot be read from the model's memory."""

    def __init__(self, checkpoint: Path) -> None:
        self._tensors = {name: tensor.clone() for name, tensor in read_checkpoint(checkpoint).items()}
        self.held: set[str] = set()

    def hold(self, wanted: TensorTable, absent: TensorTable | None = None, near: Any = ()) -> str | None:
        self.held = set(wanted)
        return None

    def writes(self, name: str) -> bool:
        return True

    def base(self, name: str) -> Any:
        assert name in self.held
        return self._tensors[name].clone()

    def settled(self, ref: Any, changes: Any) -> None:
        for name, patches in changes.items():
            for patch in patches:
                self._tensors[name].view(-1)[patch.indices] = patch.values


def live_weights(live: LoadedModel, source: Kept) -> LiveWeights:
    """Return the weights of a model as a worker holds them."""
    from deltawire.engines.vllm.live.live_weights import LiveWeights
    from deltawire.engines.vllm.worker_model import WorkerModel

    worker = WorkerModel(live.model, live.vllm_config)
    return LiveWeights(
        live.model,
        worker.learn_layout,
        source=source,
        recompute=worker.recompute,
        reprocess=worker.reprocess,
        load=worker.load_module,
        confirm="everything",
        threads=1,
    )


@dataclass(frozen=True)
class Followed:
    """A chain with all of its versions, and checkpoints of the first and of the last one."""

    chain: Chain
    first: Path
    last: Path


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Followed]:
    """Return the chain of a case. Cases with the same checkpoints have the same chain."""
    made: dict[Any, Followed] = {}

    def find(case: str) -> Followed:
        key = CASES[case], case if case in CONVERTED else None
        if key not in made:
            chain = Chain(tmp_path_factory.mktemp(case), *CASES[case], CONVERTED.get(case))
            chain.publish()
            first = chain.checkpoint()
            for _ in range(UPDATES):
                chain.publish()
            chain.close()
            made[key] = Followed(chain, first, chain.checkpoint())
        return made[key]

    return find


@pytest.mark.parametrize("case", CASES)
def test_after_twenty_updates_a_model_has_the_memory_and_the_logits_of_a_fresh_load(
    case: str, followed: Callable[[str], Followed], monkeypatch: pytest.MonkeyPatch
) -> None:
    import_vllm()
    from deltawire.engines.vllm.live.live_updates import modules_of
    from deltawire.engines.vllm.live.update_types import LiveVersion

    emulate(case, monkeypatch)
    given = followed(case)
    chain, first = given.chain, given.chain.commits[0]
    live = load_model(given.first)
    computed, before, places = logits(live), memory(live.model), addresses(live.model)

    source = Kept(given.first)
    weights = live_weights(live, source)
    weights.learn(table_of(given.first))
    assert difference(memory(live.model), before) == [], "learning has changed the model"
    assert weights.why_not is None
    assert weights.layout is not None
    assert {rule.how for rule in weights.layout.modules.values()} == ways(case)
    assert first.digest is not None
    weights.adopt(LiveVersion(ChainLog(chain.store).ref(first), first.digest))
    for number, target in enumerate(chain.commits[1:]):
        hop = FakeHop(chain.commits[number], target, target.files)
        if number == 1:  # another worker fails after this one has written, so it must write its old weights back
            held, answers = (memory(live.model), logits(live)), iter([[], [1], []])
            with live.active():
                outcome = weights.swap(weights.stage(hop, chain.read), lambda *_: next(answers))  # noqa: B023
            assert outcome.outcome == "refused"
            assert (memory(live.model), logits(live)) == held
        with live.active():
            outcome = weights.swap(weights.stage(hop, chain.read), alone)
        assert outcome.outcome == "made", outcome.error
        assert (outcome.times["modules_loaded_anew"] > 0) == ("load_anew" in ways(case))
    if COMPUTED.get(case) in (None, "recompute"):
        assert all(name.endswith("weight_shape") for name in source.held), "a tensor of the model cannot be read from its memory"
    fresh = load_model(given.last)
    assert logits(live) == logits(fresh) != computed
    assert visible(difference(memory(live.model), memory(fresh.model))) == []
    assert difference(memory(live.model), before), "no update has changed anything"
    assert stays(addresses(live.model)) == stays(places)
    assert set(modules_of(weights.layout)["counts"]) == ways(case)
    assert weights.digest().owned == target.digest


@pytest.fixture(scope="module")
def pair(nursery: ServerNursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPair]:
    with RankPair(nursery, tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.mark.parametrize(("case", "peers"), [*((case, True) for case in CASES), ("experts-split", False)])
def test_after_twenty_updates_two_ranks_have_the_memory_and_the_logits_of_a_fresh_load(
    case: str, peers: bool, followed: Callable[[str], Followed], pair: RankPair, tmp_path: Path
) -> None:
    given = followed(case)
    chain, table = given.chain, tmp_path / "tensors.json"
    write_table(table, table_of(given.first))
    ref = ChainLog(chain.store).ref(chain.commits[0]).plain()
    seqs = [commit.seq for commit in chain.commits]
    job = Job(case, str(tmp_path / "spool"), str(given.first), str(given.last), chain.store.url, str(table), ref, seqs[1:], peers)
    reports = pair.follow(job)
    for report in reports:
        assert report["learnt"]["live"], report["learnt"]["why_not"]
        assert (report["learnt"]["why_no_peers"] is None) == peers
        assert peers or (report["status"]["bases"]["peers"], report["status"]["bases"]["kept"] > 0) == (0, True)
        assert report["learning"] == [], "learning has changed the model"
        assert report["adopted"] == seqs[0]
        assert (report["failed"], report["reverted"]) == ("refused", True)
        assert [swap["outcome"] for swap in report["swaps"]] == ["made"] * UPDATES, report["swaps"]
        assert [swap["last"]["loaded_anew"] for swap in report["swaps"]] == [0] * UPDATES
        assert {swap["last"]["modules_loaded_anew"] > 0 for swap in report["swaps"]} == {"load_anew" in ways(case)}
        assert set(report["status"]["modules"]["counts"]) == ways(case)
        assert report["status"]["modules"]["whole_model"] == {}
        assert report["status"]["seq"] == seqs[-1]
        assert report["difference"] == []
        assert report["changed"] > 0, "no update has changed anything"
        assert report["stays"]
    first, live, fresh = reports[0]["logits"]
    assert live == fresh != first


def test_one_module_is_loaded_anew_while_the_others_are_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_vllm()
    from deltawire.engines.vllm import worker_model
    from deltawire.engines.vllm.live.live_updates import modules_of
    from deltawire.engines.vllm.live.update_types import LiveVersion

    requantise_on_cpu(monkeypatch)
    chain = Chain(tmp_path, TinyModel("quantised", scale=4, layers=1), None, CONVERTED["fp8-tensor"])
    first = chain.publish()
    checkpoint = chain.checkpoint()
    live = load_model(checkpoint)
    places = addresses(live.model)
    odd, process_again = "model.layers.0.self_attn.qkv_proj", worker_model.process_again

    def process_others(model: Any, vllm_config: Any, layout: Any, rule: Any, *read: Any) -> Any:
        if rule.name == odd:
            raise RuntimeError("no copies of this module")
        return process_again(model, vllm_config, layout, rule, *read)

    monkeypatch.setattr(worker_model, "process_again", process_others)
    weights = live_weights(live, Kept(checkpoint))
    weights.learn(table_of(checkpoint))
    assert modules_of(weights.layout) == {"counts": {"reprocess": 4}, "loaded_anew": {}, "whole_model": {}}
    assert first.digest is not None
    weights.adopt(LiveVersion(ChainLog(chain.store).ref(first), first.digest))

    def swap(target: Commit) -> Any:
        with live.active():
            return weights.swap(weights.stage(FakeHop(chain.commits[-2], target, target.files), chain.read), alone)

    made = swap(chain.publish())
    assert (made.outcome, made.times["modules_loaded_anew"]) == ("made", 1), made.error
    found = modules_of(weights.layout)
    assert found["counts"] == {"reprocess": 3, "load_anew": 1}
    assert list(found["loaded_anew"]) == [odd]
    assert "no copies of this module" in found["loaded_anew"][odd]

    target, held, load_weights = chain.publish(), memory(live.model), live.model.load_weights
    for most in (0, 3):  # the loader fails before the first tensor, and half-way

        def load_some(tensors: Any, most: int = most) -> Any:
            load_weights(tensor for tensor, _ in zip(tensors, range(most), strict=False))
            raise OSError("it stops here")

        with monkeypatch.context() as patch:
            patch.setattr(live.model, "load_weights", load_some)
            failed = swap(target)
        assert failed.outcome == "refused"
        assert "it stops here" in failed.error
        assert difference(memory(live.model), held) == []
    assert swap(target).outcome == "made"
    chain.close()
    fresh = load_model(chain.checkpoint())
    assert difference(memory(live.model), memory(fresh.model)) == []
    assert addresses(live.model) == places


def test_a_module_that_vllm_does_not_load_anew_correctly_is_never_left_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_vllm()
    from deltawire.engines.vllm.live.live_updates import modules_of
    from deltawire.engines.vllm.live.update_types import LiveVersion

    # vLLM 0.32 loads modules anew only if their loaders call the parameter `param`. Otherwise their memory is left undefined
    load_norms_with(monkeypatch, lambda parameter, loaded: parameter.data.copy_(2 * loaded))
    chain = Chain(tmp_path, TinyModel("dense", layers=1), None)
    first = chain.publish()
    checkpoint = chain.checkpoint()
    live = load_model(checkpoint)
    weights = live_weights(live, Kept(checkpoint))
    weights.learn(table_of(checkpoint))
    assert first.digest is not None
    weights.adopt(LiveVersion(ChainLog(chain.store).ref(first), first.digest))
    target, held = chain.publish(), memory(live.model)
    chain.close()
    hop = FakeHop(first, target, target.files)
    staged, norm = weights.stage(hop, chain.read), "model.layers.0.input_layernorm"
    with live.active():
        outcome = weights.swap(staged, alone)
    assert outcome.outcome == "refused"
    assert difference(memory(live.model), held) == []
    assert norm in modules_of(weights.layout)["whole_model"]
    with pytest.raises(EngineRefused, match=f"all weights must be loaded anew, because of tensor '{norm}.weight'"):
        weights.stage(hop, chain.read)
