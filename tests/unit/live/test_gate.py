"""The gate with a store: answers that count, decisions, evidence, and moves of channels."""

from __future__ import annotations

import dataclasses

import pytest
from gated_chain import POLICY, SOLVED, Answered, GatedChain

from deltawire import SigningKey
from deltawire.errors import CorruptRecord, SignatureInvalid, UnusableGate
from deltawire.format.feedback import Feedback, FeedbackFile
from deltawire.format.interactions import AnswerFacts, Interactions
from deltawire.format.records.gate_records import ChannelPosition, EvaluationResult
from deltawire.format.records.live_records import Metric
from deltawire.live.gate_rules import GatePolicy, Limit, Range
from deltawire.live.gate_traffic import CanaryTraffic, Source
from deltawire.store import live_keys

EPISODES = "0190a0b0-c0d0-4000-9000-{:012x}".format
KEY = SigningKey.generate()


class Evaluations:
    """An evaluator whose results a test sets."""

    def __init__(self, terms=None):
        self.terms = terms
        self.started = []
        self.stopped = 0
        self.result = None

    def start(self, canary, stable, attempt):
        self.started.append((canary.seq, stable.seq, attempt))

    def poll(self):
        return self.result

    def stop(self):
        self.stopped += 1


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
def test_a_better_canary_is_promoted_once(key):
    chain = GatedChain(key=key)
    gate = chain.gate()
    assert gate.look().state == "watching"
    chain.traffic(0.9, 0.5)
    look = gate.look()
    assert (look.state, look.record.outcome) == ("decided", "promote")
    assert (look.moved.channel, look.moved.kind, look.moved.target.seq) == ("stable", "promote", 3)
    assert "solved:-0 holds" in look.moved.why
    assert gate.look().state == "idle"
    assert chain.gate().look().state == "idle"
    assert chain.moves("stable") == [("promote", 2), ("promote", 3)]
    assert chain.moves("canary") == [("promote", 3)]
    assert [record.outcome for record in chain.records()] == ["continue", "promote"]
    assert [event.name for event in chain.events if event.name.startswith("gate")][-2:] == ["gate-limit", "gate-decided"]


def test_a_canary_that_was_promoted_before_is_not_promoted_over_a_later_move():
    chain = GatedChain()
    chain.traffic(0.9, 0.5)
    assert chain.gate().look().stale is None
    chain.promote(4, "stable")
    for dry_run in (False, True):
        look = chain.gate(dry_run=dry_run).look()
        assert (look.state, look.moved) == ("decided", None)
        by = chain.chain.reader("stable").newest().by
        assert look.stale == (
            f"nothing to do: this canary was promoted before (move 1), and stable was moved since (move 2 by {by}). "
            "Promote another version to canary."
        )
    assert chain.moves("stable") == [("promote", 2), ("promote", 3), ("promote", 4)]
    chain.promote(3, "canary")  # the same version again is another canary
    assert chain.gate().look().state == "watching"


def test_a_decision_that_came_after_a_move_of_stable_is_told_as_such():
    chain = GatedChain()
    chain.traffic(0.9, 0.5)
    gate = chain.gate()
    gate._move = lambda record: None  # the gate dies after it has written the decision
    gate.look()
    chain.promote(4, "stable")
    assert "was to be promoted, but stable was moved first (move 1 by " in chain.gate().look().stale


def test_a_worse_canary_is_rolled_back_to_stable():
    chain = GatedChain()
    chain.traffic(0.2, 0.7)
    look = chain.gate().look()
    assert (look.record.outcome, look.moved.channel, look.moved.kind, look.moved.target.seq) == ("rollback", "canary", "rollback", 2)
    assert chain.moves("stable") == [("promote", 2)]
    assert chain.gate().look().state == "idle"


def test_equal_channels_go_on_until_the_time_is_over():
    chain = GatedChain()
    gate = chain.gate()
    chain.traffic(0.6, 0.6)
    assert gate.look().record.outcome == "continue"
    chain.pass_time(1000)
    chain.tick()
    look = gate.look()
    assert look.record.outcome == "rollback"
    assert "no decision after" in look.record.why
    assert chain.target("canary") == 2


def test_a_gate_without_traffic_reads_the_time_from_its_own_records():
    chain = GatedChain()
    ticks = [0.0]
    gate = chain.gate(ticks=lambda: ticks[0])
    for _ in range(4):
        assert gate.look().state == "watching"
    assert len(chain.records()) == 1
    chain.pass_time(2000)
    ticks[0] += 10.0
    assert gate.look().state == "watching"  # this look writes the record, whose time is the store's
    assert gate.look().record.outcome == "rollback"


def test_an_answer_counts_when_its_window_is_over():
    chain = GatedChain()
    gate = chain.gate()
    chain.answer([Answered("canary", 3, True), Answered("stable", 2, False)] * 50)
    chain.pass_time(59)
    chain.tick()
    look = gate.look()
    assert look.record.limits[0].canary.count == 0
    assert look.record.answers == 50
    chain.pass_time(2)
    chain.tick()
    assert gate.look().record.limits[0].canary.count == 50


def test_an_answer_may_count_earlier_by_an_option():
    chain = GatedChain()
    chain.answer([Answered("canary", 3, True)] * 3)
    chain.pass_time(11)
    chain.tick()
    assert chain.gate(wait=10.0).look().record.limits[0].canary.count == 3
    assert chain.gate(wait=11.0, dry_run=True).look().record.limits[0].canary.count == 0


def test_feedback_counts_once_with_its_last_revision_and_only_in_its_window():
    chain = GatedChain()
    ids = chain.answer([Answered("canary", 3)] * 6)
    first = Feedback(chain.new_id(), "solved", False, inference=ids[0])
    chain.put_feedback([first, Feedback(chain.new_id(), "solved", True, inference=ids[1])])
    chain.put_feedback([first, dataclasses.replace(first, value=True)][:1])  # the same again
    chain.put_feedback([dataclasses.replace(first, value=True)])  # the same id with another value
    chain.put_feedback([Feedback(chain.new_id(), "solved", False, inference=ids[2], revision=1)])
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=ids[2])])  # an earlier revision
    chain.put_feedback([Feedback(chain.new_id(), "solved", 1.0, inference=ids[3])])  # not a boolean
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=ids[4], caller="other")])  # not its caller
    chain.put_feedback([Feedback(chain.new_id(), "other", True, inference=ids[3])])
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=chain.new_id())])  # an unknown answer
    chain.pass_time(60)
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=ids[5])])  # just in time
    chain.pass_time(1)
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=ids[0], revision=9)])  # too late
    chain.tick()
    found = chain.gate().look().record.limits[0].canary
    assert (found.count, found.count * found.mean) == (6, 2)


def test_the_clock_of_a_gateway_does_not_decide_which_feedback_counts():
    chain = GatedChain()
    [name] = chain.answer([Answered("canary", 3)])
    for clock, value in ((2, False), (0, False), (1, True)):
        chain.put_feedback([Feedback(chain.new_id(), "solved", value, inference=name, time=clock)])
        chain.pass_time(2)
    chain.pass_time(61)
    chain.tick()
    found = chain.gate().look().record.limits[0].canary
    assert (found.count, found.mean) == (1, 1)


def test_feedback_may_be_stored_before_its_answer():
    chain = GatedChain()
    identifier = chain.new_id()
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=identifier)])
    chain.pass_time(5)
    chain.put_interactions([Answered("canary", 3)], [identifier])
    chain.pass_time(61)
    chain.tick()
    assert chain.gate().look().record.limits[0].canary.mean == 1.0


def test_an_answer_without_feedback_counts_only_with_a_default():
    chain = GatedChain([dataclasses.replace(SOLVED, default=None)])
    chain.answer([Answered("canary", 3), Answered("canary", 3, True), Answered("stable", 2)])
    chain.pass_time(61)
    chain.tick()
    found = chain.gate().look().record.limits[0]
    assert (found.canary.count, found.stable.count) == (1, 0)


def test_defaults_alone_promote_nothing():
    """The values of a judge are in the memory of a trainer, so a gate sees only the default of the metric."""
    chain = GatedChain()
    policy = GatePolicy((Limit.parse("solved:-0.05", must_hold=True),), min_answers=20)
    gate = chain.gate(policy)
    ids = chain.answer([Answered("canary", 3), Answered("stable", 2)] * 1000)
    chain.pass_time(61)
    chain.tick()
    record = gate.look().record
    assert record.limits[0].low > -0.05  # the numbers prove it
    assert (record.limits[0].verdict, record.outcome) == ("open", "continue")
    assert record.why == "solved:-0.05 is not proved, because there is too little feedback on the canary and stable"
    chain.put_feedback([Feedback(chain.new_id(), "solved", False, inference=ids[0])])  # too late to count
    assert gate.look().record.limits[0].verdict == "open"
    chain.answer([Answered("stable", 2, True)] * 3 + [Answered("canary", 3, True)] * 2)
    chain.pass_time(61)
    chain.tick()
    record = gate.look().record
    told = "solved:-0.05 is not proved, because there is too little feedback on the canary"
    assert (record.outcome, record.why) == ("continue", told)
    chain.answer([Answered("canary", 3, True)])
    chain.pass_time(61)
    chain.tick()
    assert gate.look().record.outcome == "promote"


def test_a_canary_that_nobody_rates_may_be_rolled_back():
    chain = GatedChain()
    chain.answer([Answered("canary", 3), Answered("stable", 2, True)] * 100)
    chain.pass_time(61)
    chain.tick()
    assert chain.gate().look().record.outcome == "rollback"


JUNK = [{"metric": "other"}, {"value": "so so"}, {"value": 1.0}, {"inference": None, "episode": EPISODES(1)}, {"caller": "loud"}]


@pytest.mark.parametrize("junk", JUNK, ids=str)
def test_a_flood_of_feedback_takes_nobodys_place(junk):
    chain = GatedChain()
    position = ChannelPosition("canary", 0, chain.chain.reader("canary").newest().target)
    traffic = CanaryTraffic(position, dataclasses.replace(position, channel="stable"), [SOLVED], most_feedback=110)
    about = {"metric": "solved", "value": True, "inference": chain.new_id(), **junk}
    flood = [Feedback(chain.new_id(), **about) for _ in range(1000)]
    ids = [chain.new_id() for _ in range(90)]
    told = [Feedback(chain.new_id(), "solved", True, inference=name) for name in ids]
    traffic.add_feedback(FeedbackFile(chain.run, chain.session, 0, tuple(flood)), 1.0)
    traffic.add_feedback(FeedbackFile(chain.run, chain.session, 1, tuple(told)), 2.0)
    chain.put_interactions([Answered("canary", 3)] * 90, ids)
    [stored] = chain.store.list("live/interactions/")
    traffic.add_interactions(Interactions.parse(chain.store.get(stored.key, limit=1 << 20)), 3.0)
    samples = traffic.samples(Source.find("solved", [SOLVED]), 100.0)
    assert [sample.value for sample in samples] == [1.0] * 90


def test_a_caller_that_rates_too_many_answers_leaves_room_for_others():
    chain = GatedChain()
    position = ChannelPosition("canary", 0, chain.chain.reader("canary").newest().target)
    traffic = CanaryTraffic(position, dataclasses.replace(position, channel="stable"), [SOLVED], most_feedback=900)
    ids = {"loud": [chain.new_id() for _ in range(2000)], "quiet": [chain.new_id() for _ in range(50)]}
    answers = [(name, caller) for caller, names in ids.items() for name in names]
    chain.put_interactions([Answered("canary", 3, caller=caller) for _, caller in answers], [name for name, _ in answers])
    [stored] = chain.store.list("live/interactions/")
    traffic.add_interactions(Interactions.parse(chain.store.get(stored.key, limit=1 << 22)), 0.0)
    for number, caller in enumerate(["loud", "loud", "quiet"]):
        told = tuple(Feedback(chain.new_id(), "solved", True, inference=name, caller=caller) for name in ids[caller])
        traffic.add_feedback(FeedbackFile(chain.run, chain.session, number, told), 1.0 + number)
    values = [sample.value for sample in traffic.samples(Source.find("solved", [SOLVED]), 100.0)]
    assert sum(values[:2000]) == 800
    assert values[2000:] == [1.0] * 50


def test_the_last_of_many_revisions_counts():
    chain = GatedChain()
    [name] = chain.answer([Answered("canary", 3)])
    for number in range(500):
        chain.put_feedback([Feedback(chain.new_id(), "solved", number == 499, inference=name)])
        chain.pass_time(0.1)
    chain.pass_time(61)
    chain.tick()
    assert chain.gate().look().record.limits[0].canary.mean == 1.0


@pytest.mark.parametrize("wait", [None, 10.0])
def test_revisions_that_come_too_late_do_not_change_a_value_that_has_counted(wait):
    chain = GatedChain()
    gate = chain.gate(wait=wait)
    [name] = chain.answer([Answered("canary", 3)])
    chain.pass_time((wait or 60) - 1)
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=name)])
    chain.pass_time(1.2)
    for _ in range(200):  # each of them was the newest for longer than the first one
        chain.put_feedback([Feedback(chain.new_id(), "solved", False, inference=name)])
        chain.pass_time(2)
    chain.tick()
    assert gate.look().record.limits[0].canary.count == 1
    for _ in range(200):
        chain.put_feedback([Feedback(chain.new_id(), "solved", False, inference=name, revision=1)])
        chain.pass_time(2)
    chain.tick()
    found = gate.look().record.limits[0].canary
    assert (found.count, found.mean) == (1, 1.0)


def test_only_answers_of_the_versions_and_channels_at_hand_count():
    chain = GatedChain()
    chain.answer([Answered("canary", 2, True), Answered("stable", 3, True), Answered("beta", 3, True), Answered(None, 2, True)])
    chain.answer([Answered("canary", 3, True), Answered("stable", 2, True)])
    chain.pass_time(61)
    chain.tick()
    look = chain.gate().look()
    assert look.record.answers == 1
    assert (look.record.limits[0].canary.count, look.record.limits[0].stable.count) == (1, 1)


def test_answers_from_before_the_canary_do_not_count():
    chain = GatedChain()
    chain.answer([Answered("canary", 4, True)] * 5)
    chain.pass_time(1)
    chain.promote(4, "canary")
    chain.answer([Answered("canary", 4, True)] * 2)
    assert chain.gate().look().record.answers == 2


def test_files_of_another_run_and_damaged_ones_are_reported_and_do_not_count():
    chain = GatedChain()
    ids = chain.answer([Answered("canary", 3)])
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, inference=ids[0])], run="ef" * 16)
    for key in list(chain.store.list(live_keys.FEEDBACK)):
        chain.store.put(key.key.replace("00-", "07-", 1), chain.store.get(key.key, limit=1 << 20))
    chain.store.put(f"{live_keys.INTERACTIONS}{chain.session}/{1:020}-{'0' * 64}.bin", b"nonsense")
    chain.pass_time(61)
    chain._numbers["interactions"] += 1
    chain.tick()
    assert chain.gate().look().record.limits[0].canary.mean == 0.0
    assert [event.name for event in chain.events].count("live-file-refused") == 3


def test_an_episode_counts_once_as_its_first_answer():
    chain = GatedChain([dataclasses.replace(SOLVED, level="episode")])
    chain.answer([Answered("canary", 3, episode=EPISODES(number)) for number in (1, 1, 2)])
    chain.put_feedback([Feedback(chain.new_id(), "solved", True, episode=EPISODES(1))])
    chain.pass_time(30)
    chain.answer([Answered("canary", 3, episode=EPISODES(2))])  # its window begins anew
    chain.pass_time(31)
    chain.tick()
    gate = chain.gate()
    assert gate.look().record.limits[0].canary.count == 1
    chain.pass_time(30)
    chain.tick()
    found = gate.look()
    assert found.record.limits[0].canary == dataclasses.replace(found.record.limits[0].canary, count=2, mean=0.5)


def test_each_user_may_count_once():
    chain = GatedChain()
    users = ["ab" * 32, "cd" * 32, "ab" * 32, None, None]
    chain.answer([Answered("canary", 3, True, user=user) for user in users])
    chain.pass_time(61)
    chain.tick()
    assert chain.gate(by_user=True, dry_run=True).look().record.limits[0].canary.count == 4
    assert chain.gate(dry_run=True).look().record.limits[0].canary.count == 5


@pytest.mark.parametrize(
    ("monitor", "canary"),
    [
        ("length:+20%", AnswerFacts(90)),
        ("length:-50%", AnswerFacts(1)),
        ("refusal:+0.1", AnswerFacts(30, refusal=True)),
        ("bad_tool_calls:+0.1", AnswerFacts(30, tool_calls=1, bad_tool_calls=2)),
    ],
)
def test_a_monitor_rolls_a_canary_back_that_users_like(monitor, canary):
    chain = GatedChain()
    policy = GatePolicy((*POLICY.limits, Limit.parse(monitor, must_hold=False)), min_answers=20)
    chain.answer([Answered("canary", 3, True, canary), Answered("stable", 2, False, AnswerFacts(30, tool_calls=2))] * 120)
    look = chain.gate(policy, ranges={"length": Range(0.0, 100.0)}).look()
    assert look.record.outcome == "rollback"
    assert f"{monitor} is broken" in look.record.why
    assert chain.target("canary") == 2


def test_answers_whose_text_the_gateway_had_lost_count_only_with_their_length():
    chain = GatedChain()
    monitors = tuple(Limit.parse(each, must_hold=False) for each in ("length:+20%", "refusal:+0.1", "bad_tool_calls:+0.1"))
    policy = GatePolicy((*POLICY.limits, *monitors), min_answers=20)
    known, lost = AnswerFacts(30, tool_calls=1), AnswerFacts(30, has_text=False)
    chain.answer([Answered(channel, seq, None, facts) for channel, seq in (("canary", 3), ("stable", 2)) for facts in (known, lost, lost)])
    found = chain.gate(policy, ranges={"length": Range(0.0, 100.0)}, dry_run=True).look().record.limits
    assert [each.canary.count for each in found[-3:]] == [3, 1, 1]
    assert [each.stable.count for each in found[-3:]] == [3, 1, 1]


DIVERTED = GatePolicy((Limit.parse("solved:-0.2", must_hold=True), Limit.parse("diverted:+0.05", must_hold=False)), min_answers=20)


def hard_prompts(every):
    """Return answers of both channels, and of stable to those users of the canary whose prompts are hard. Hard ones are never solved."""
    found = []
    for number in range(600):
        is_hard = number % every == 0
        found.append(Answered("stable", 2, not is_hard))
        found.append(Answered("stable", 2, False, diverted_from="canary") if is_hard else Answered("canary", 3, True))
    return found


def test_a_canary_that_leaves_hard_prompts_to_others_is_rolled_back():
    chain = GatedChain()
    chain.answer([Answered("canary", 3, True)])
    chain.answer(hard_prompts(3))
    chain.pass_time(61)
    chain.tick()
    record = chain.gate(DIVERTED).look().record
    assert record.outcome == "rollback"
    solved, diverted = record.limits
    assert (solved.canary.count, solved.stable.count) == (401, 600)  # the answers to diverted users are nobody's
    assert (diverted.verdict, diverted.canary.count, diverted.stable.count, diverted.stable.mean) == ("broken", 601, 600, 0)
    assert diverted.canary.mean * diverted.canary.count == 200
    assert record.answers == 401


def test_requests_that_are_diverted_before_a_canary_begins_do_not_count():
    chain = GatedChain()
    chain.answer([Answered("stable", 2, False, diverted_from="canary"), Answered("stable", 2, True)] * 300)
    chain.pass_time(1)
    chain.answer([Answered("canary", 3, True), Answered("stable", 2, True)] * 300)
    chain.answer([Answered("stable", 2, False, diverted_from="canary"), Answered("stable", 2, True, diverted_from="beta")])
    chain.pass_time(61)
    chain.tick()
    record = chain.gate(DIVERTED).look().record
    assert (record.limits[1].canary.count, record.limits[1].stable.count) == (301, 600)
    assert record.outcome == "promote"


@pytest.mark.parametrize("monitor", ["length:+20%", "diverted:+0.05", "refusal:+0.1", "bad_tool_calls:+0.1", "solved:-0.1"])
def test_a_request_with_many_completions_is_one_answer(monitor):
    evaluations = Evaluations()
    evaluations.result = EvaluationResult(True, 1, "the command exited with code 0")
    policy = GatePolicy((Limit.parse(monitor, must_hold=False),), evaluate=True, min_answers=100)
    chain = GatedChain()
    gate = chain.gate(policy, evaluator=evaluations)
    gate.look()
    name = chain.new_id()
    tools = AnswerFacts(3, tool_calls=1)
    chain.put_interactions([Answered("canary", 3, facts=tools, choice=choice) for choice in range(128)], [name] * 128)
    chain.answer([Answered("stable", 2, facts=tools)] * 100)
    chain.pass_time(61)
    chain.tick()
    record = gate.look().record
    assert (record.answers, record.limits[0].canary.count, record.limits[0].stable.count) == (1, 1, 100)
    assert (record.outcome, record.why) == ("continue", "the canary has given 1 of 100 answers")
    chain.answer([Answered("canary", 3)] * 99)  # without tool calls, which no promotion waits for
    chain.pass_time(61)
    chain.tick()
    assert gate.look().record.outcome == "promote"


def test_a_monitor_needs_answers_of_stable_before_a_promotion():
    evaluations = Evaluations()
    evaluations.result = EvaluationResult(True, 1, "the command exited with code 0")
    chain = GatedChain()
    gate = chain.gate(GatePolicy((Limit.parse("length:+20%", must_hold=False),), evaluate=True), evaluator=evaluations)
    gate.look()
    chain.answer([Answered("canary", 3)] * 100 + [Answered("stable", 2)] * 99)
    assert gate.look().record.why == "length:+20% needs 100 answers of each channel, and has 100 of the canary and 99 of stable"
    chain.answer([Answered("stable", 2)])
    assert gate.look().record.outcome == "promote"


def test_an_evaluation_is_made_once_and_is_evidence():
    chain = GatedChain()
    evaluations = Evaluations()
    policy = GatePolicy(evaluate=True)
    gate = chain.gate(policy, evaluator=evaluations)
    look = gate.look()
    assert look.is_evaluating
    assert evaluations.started == [(3, 2, 1)]
    assert gate.look().is_evaluating
    evaluations.result = EvaluationResult(None, 1, "it took too long")
    assert gate.look().is_evaluating
    assert chain.records()[-1].evaluation == evaluations.result
    evaluations.result = EvaluationResult(True, 2, "the command exited with code 0", {"accuracy": 0.5})
    look = chain.gate(policy, evaluator=evaluations).look()  # another process continues with the second attempt
    assert evaluations.started[-1] == (3, 2, 2)
    look = gate.look()
    assert look.record.outcome == "promote"
    assert look.record.evaluation.scores == {"accuracy": 0.5}
    assert chain.target("stable") == 3


@pytest.mark.parametrize(("other", "starts"), [("ab" * 32, 0), ("cd" * 32, 1), (None, 1)])
def test_the_result_of_an_evaluation_by_other_terms_is_not_used(other, starts):
    chain = GatedChain()
    policy = GatePolicy(evaluate=True, min_seconds=100.0)
    first = Evaluations("ab" * 32)
    gate = chain.gate(policy, evaluator=first)
    gate.look()
    first.result = EvaluationResult(True, 1, "accuracy is 0.9, at least 0.8")
    assert gate.look().record.evaluation == dataclasses.replace(first.result, terms="ab" * 32)
    second = Evaluations(other)
    look = chain.gate(policy, evaluator=second).look()
    assert (len(second.started), look.is_evaluating) == (starts, bool(starts))
    if starts:
        assert "the evaluation has not passed yet" in look.record.why


def test_a_refused_evaluation_rolls_back():
    chain = GatedChain()
    evaluations = Evaluations()
    gate = chain.gate(GatePolicy(evaluate=True), evaluator=evaluations)
    gate.look()
    evaluations.result = EvaluationResult(False, 1, "the command exited with code 1")
    assert gate.look().moved.kind == "rollback"


def test_an_evaluation_ends_with_its_canary():
    chain = GatedChain()
    evaluations = Evaluations()
    gate = chain.gate(GatePolicy(evaluate=True), evaluator=evaluations)
    gate.look()
    chain.promote(4, "canary")
    before = evaluations.stopped
    gate.look()
    assert evaluations.stopped > before
    assert evaluations.started[-1] == (4, 2, 1)


def test_a_new_canary_is_judged_anew():
    chain = GatedChain()
    gate = chain.gate()
    chain.traffic(0.1, 0.9)
    assert gate.look().record.outcome == "rollback"
    chain.promote(3, "canary")
    assert gate.look().record.limits[0].canary.count == 0
    chain.traffic(0.95, 0.5, seed=1)
    assert gate.look().record.outcome == "promote"
    assert chain.moves("canary") == [("promote", 3), ("rollback", 2), ("promote", 3)]


def test_another_share_changes_nothing_for_the_gate():
    chain = GatedChain()
    gate = chain.gate()
    chain.traffic(0.9, 0.5, 20)
    before = gate.look().record.answers
    chain.chain.writer("canary").set_share(900_000)
    chain.traffic(0.9, 0.5, seed=1)
    look = gate.look()
    assert look.record.outcome == "promote"
    assert look.record.canary.move == 0
    assert 0 < before < look.record.limits[0].canary.count


def test_a_channel_that_was_moved_since_the_decision_stays_where_it_is():
    chain = GatedChain()
    chain.traffic(0.9, 0.5)
    decided = chain.gate(dry_run=True).look().record
    assert decided.outcome == "promote"
    chain.store.put_if_absent(live_keys.gate_key("canary", 0, 0), decided.to_bytes())  # the gate died here
    chain.promote(1, "stable")
    look = chain.gate().look()
    assert (look.state, look.moved) == ("decided", None)
    assert chain.target("stable") == 1


def test_a_move_is_not_repeated_after_somebody_took_it_back():
    chain = GatedChain()
    chain.traffic(0.9, 0.5)
    gate = chain.gate()
    gate.look()
    chain.chain.rollback("stable")
    look = gate.look()
    assert (look.state, look.moved) == ("decided", None)
    assert chain.gate().look().moved is None
    assert chain.moves("stable") == [("promote", 2), ("promote", 3), ("rollback", 2)]


def test_a_rollback_leads_to_the_present_version_of_stable():
    chain = GatedChain()
    chain.traffic(0.1, 0.9)
    decided = chain.gate(dry_run=True).look().record
    chain.store.put_if_absent(live_keys.gate_key("canary", 0, 0), decided.to_bytes())
    chain.promote(4, "stable")
    assert chain.gate().look().moved.target.seq == 4


def test_of_two_gates_one_decides():
    chain = GatedChain()
    first, second = chain.gate(), chain.gate(GatePolicy((Limit.parse("solved:+0", must_hold=True),), min_answers=20))
    first.look()
    second.look()
    chain.traffic(0.9, 0.5)
    assert first.look().record.outcome == "promote"
    assert second.look().state == "idle"
    assert chain.moves("canary") == [("promote", 3)]


def test_a_dry_run_writes_nothing():
    chain = GatedChain()
    chain.traffic(0.9, 0.5)
    before = len(chain.store.calls)
    look = chain.gate(dry_run=True).look()
    assert (look.state, look.record.outcome, look.moved) == ("decided", "promote", None)
    assert {each.op for each in chain.store.calls[before:]} <= {"get", "head", "list"}


def test_evidence_that_nobody_trusted_signed_moves_nothing():
    chain = GatedChain(key=KEY)
    chain.traffic(0.5, 0.5)
    record = dataclasses.replace(chain.gate(dry_run=True).look().record, outcome="promote")
    chain.store.put_if_absent(live_keys.gate_key("canary", 0, 0), record.to_bytes())
    with pytest.raises(SignatureInvalid):
        chain.gate().look()
    assert chain.target("stable") == 2


def test_evidence_of_another_canary_is_refused():
    chain = GatedChain()
    record = chain.gate(dry_run=True).look().record
    chain.store.put_if_absent(live_keys.gate_key("canary", 0, 5), record.to_bytes())
    with pytest.raises(CorruptRecord):
        chain.gate().look()


def test_there_may_be_no_canary():
    chain = GatedChain()
    assert chain.gate(canary="beta").look().state == "waiting"
    chain.chain.rollback("canary", to=2)
    assert chain.gate().look().state == "idle"


@pytest.mark.parametrize(
    ("metrics", "limit", "match"),
    [((SOLVED,), "sloved", "not declared"), ((Metric("rating", type="float"),), "rating", "no range")],
)
def test_a_metric_that_cannot_be_judged_is_named(metrics, limit, match):
    chain = GatedChain(metrics)
    with pytest.raises(UnusableGate, match=match):
        chain.gate(GatePolicy((Limit.parse(limit, must_hold=True),))).look()
