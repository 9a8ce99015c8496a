"""Events of trainers with a fleet."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind

_METRIC = f.number("…", "Metrics of the step have TRL's names where they mean the same, such as `loss` and `rewards/NAME/mean`.").maybe
_MISMATCH = (
    f.TOKENS,
    f.number("kl", "This is an estimate of the KL divergence per token.", "nats"),
    f.number("logp_difference_mean", "This is the mean of the absolute differences of log-probs.", "nats"),
    f.number("logp_difference_max", "This is the largest of them.", "nats"),
    f.number("ratio_min", "This is the smallest ratio of probabilities."),
    f.number("ratio_mean", "This is the mean ratio of probabilities."),
    f.number("ratio_max", "This is the largest ratio of probabilities."),
    f.number("truncated_ratio", "The importance weights of this share of tokens were out of bounds."),
    f.number("ess", "This is the effective sample size as a share of the tokens."),
    f.LAG,
)

KINDS = (
    EventKind("round-opened", "debug", "A round has begun.", (f.ROUND, f.STEP, f.TASKS)),
    EventKind("round-adopted", "info", "An earlier trainer's round continues.", (f.ROUND, f.STEP, f.EPOCH)),
    EventKind("round-unusable", "warning", "A round of an earlier trainer cannot be continued.", (f.ROUND, f.STEP, f.ERROR.maybe)),
    EventKind("rollout-accepted", "debug", "A result counts.", (f.ROUND, f.TASK, f.ATTEMPT, f.MEMBER, f.STEP, f.TOKENS)),
    EventKind(
        "rollout-rejected",
        "info",
        "A result does not count.",
        (f.ROUND, f.TASK, f.ATTEMPT, f.MEMBER.maybe, f.STEP, f.REASON, f.WHY.maybe),
    ),
    EventKind("live-joined", "info", "Interactions with users have their rewards, and are in a round.", (f.ROUND, f.STEP, f.RESULTS)),
    EventKind(
        "metrics-replaced",
        "warning",
        "The trainer has declared metrics with other names or settings than those in force, and has replaced those.",
        (f.text("before", "These metrics were in force."), f.text("after", "These metrics are in force now.")),
    ),
    EventKind("judge-failed", "warning", "The judge of next messages raised an error.", (f.ERROR,)),
    EventKind(
        "batch-acknowledged",
        "debug",
        "The results of a step are on record.",
        (f.ROUND, f.STEP, f.RESULTS),
    ),
    EventKind(
        "trained",
        "info",
        "A step is trained and published.",
        (
            f.STEP,
            f.SEQ,
            f.BYTES,
            f.STATE_BYTES,
            f.CHANGED.maybe,
            f.seconds("publish_seconds", "Publishing took this long."),
            f.seconds("idle_seconds", "The trainer waited this long for results."),
            f.seconds("train_seconds", "Training took this long."),
        ),
        others=_METRIC,
    ),
    EventKind(
        "mismatch",
        "debug",
        "This is how far the policies that drew a step's tokens are from the trainer's.",
        (
            f.STEP,
            f.text("by", "The tokens have this in common: `all`, `lag`, `member` or `engine`."),
            f.text("group", "This is the value that they have in common.").maybe,
            *_MISMATCH,
        ),
    ),
    EventKind(
        "mismatch-alarm",
        "warning",
        "The mismatch of a member begins to stand out.",
        (
            f.STEP,
            f.MEMBER,
            f.number("kl", "This is an estimate of the KL divergence per token.", "nats"),
            f.number("others", "This is the estimate for the other members.", "nats"),
            f.TOKENS,
        ),
    ),
    EventKind("member-excluded", "warning", "A member gets no more tasks, and its results are refused.", (f.MEMBER, f.WHY)),
    EventKind(
        "completion",
        "debug",
        "This is a sample of the completions that were trained on.",
        (f.STEP, f.MEMBER, f.text("prompt", "This is the end of the prompt."), f.text("completion", "This is the completion.")),
        others=f.number("rewards/…", "There is one reward for each reward function.").maybe,
    ),
    EventKind(
        "evaluated",
        "info",
        "The evaluation function has run.",
        (f.STEP,),
        others=f.number("…", "These are the numbers of the evaluation function."),
    ),
    EventKind("step-skipped", "warning", "No result of a step could be trained on.", (f.STEP, f.WHY)),
    EventKind("iterations-skipped", "warning", "Some passes over a batch were skipped.", (f.STEP, f.WHY)),
    EventKind(
        "member-left",
        "info",
        "A member has left. `why` names the error. It is absent if the member left as it should.",
        (f.MEMBER, f.WHY.maybe),
    ),
    EventKind("waiting-for-members", "warning", "No member is alive.", (f.STEP,)),
    EventKind("fleet-retrying", "info", "A request failed and is repeated.", (f.STEP.maybe, f.ERROR)),
    EventKind(
        "sweep-failed", "warning", "Old objects could not be deleted: those of rounds, live traffic, or evidence of gates.", (f.ERROR,)
    ),
)
