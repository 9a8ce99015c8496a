"""Sound files of live traffic, for tests."""

from __future__ import annotations

import numpy as np

from deltawire import Digest
from deltawire.format.feedback import Feedback, FeedbackFile
from deltawire.format.interactions import AnswerFacts, ConversationText, Interaction, Interactions, Message
from deltawire.format.records.live_records import Metric, Metrics
from deltawire.format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan

RUN, NONCE, SESSION = "ab" * 16, "cd" * 16, "west-1.0123456789abcdef"
ID = "0190a0b0-c0d0-7000-8000-{:012x}".format
EPISODE = "0190a0b0-c0d0-4000-9000-000000000001"


def answer(prompt: int, length: int, *spans: TokenSpan) -> Completion:
    return Completion(
        prompt=prompt,
        tokens=np.arange(length, dtype=np.int32) + 7,
        logprobs=-np.arange(length, dtype=np.float32) / 8,
        mask=np.ones(length, np.uint8),
        rewards=(),
        spans=spans or (TokenSpan(0, length, 5),),
        finished=True,
    )


ROLLOUTS = Rollouts(
    run=RUN,
    round=0,
    task=0,
    attempt=0,
    member=SESSION,
    nonce=NONCE,
    prompts=(np.array([1, 2, 3], np.int32), np.array([4], np.int32)),
    completions=(answer(0, 3), answer(1, 4, TokenSpan(0, 1, 5), TokenSpan(1, 4, 6))),
    reward_names=(),
    versions={5: ClaimedVersion(2, Digest((1, 2, 3, 4))), 6: ClaimedVersion(3, Digest())},
)
PLAIN = Interaction(ID(1), 7, "chat", "demo", "stop", True, 1.0, 1.0, AnswerFacts(3))
FULL = Interaction(
    id=ID(2),
    time=8,
    route="responses",
    model="größer",
    finish="tool_calls",
    train=False,
    temperature=0.7,
    top_p=0.95,
    facts=AnswerFacts(4, True, 2, 1),
    episode=EPISODE,
    choice=1,
    user="ef" * 32,
    channel="canary",
    caller="app",
    tags={"country": "DE"},
    text=ConversationText((Message("system", "Be kind."), Message("user", "Hi\nthere")), "Hallo!"),
)
INTERACTIONS = Interactions(3, (PLAIN, FULL), ROLLOUTS)
FEEDBACK = FeedbackFile(
    RUN,
    SESSION,
    4,
    (
        Feedback(ID(11), "thumbs", True, inference=ID(1), time=9),
        Feedback(ID(12), "rating", 0.25, episode=EPISODE, revision=2, tags={"by": "judge"}, caller="app"),
        Feedback(ID(13), "comment", "So so.\nReally.", inference=ID(2)),
    ),
)
METRICS = Metrics(
    RUN,
    2,
    NONCE,
    (
        Metric("thumbs"),
        Metric("rating", "episode", "float", 86400, 60, 0.5, 2.0, 0.0, 1.0),
    ),
    1,
)
