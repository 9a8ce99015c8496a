"""Events of members of a fleet, and of the program that starts them."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind

KINDS = (
    EventKind("joined", "info", "The member has joined the fleet.", (f.MEMBER, f.REWARDS)),
    EventKind("left", "info", "The member has left the fleet.", (f.MEMBER, f.TOKENS)),
    EventKind("run-over", "info", "The trainer has told all members to leave.", (f.MEMBER, f.STEP.maybe)),
    EventKind("generating", "debug", "The member begins to work on a task.", (f.ROUND, f.TASK, f.ATTEMPT, f.SEQ)),
    EventKind("generated", "debug", "The member has the result of a task.", (f.ROUND, f.TASK, f.TOKENS, f.SECONDS)),
    EventKind(
        "task-dropped",
        "debug",
        "The version changed before a leased task began, so the member drops the lease.",
        (f.MEMBER, f.ROUND, f.TASK),
    ),
    EventKind("rollout-uploaded", "debug", "A result is in the store.", (f.MEMBER, f.ROUND, f.TASK, f.TOKENS)),
    EventKind(
        "routing-broken",
        "warning",
        "An engine recorded rows of experts that name an expert twice, and they were dropped.",
        (f.integer("rows", "This many rows were dropped."), f.integer("of", "There were this many rows.")),
    ),
    EventKind("routing-unusable", "warning", "Experts are not recorded, or cannot be used. Results come without them.", (f.REASON,)),
    EventKind(
        "work-failed",
        "warning",
        "A task failed.",
        (
            f.ERROR,
            f.REASON,
            f.text("traceback", "This is Python's traceback.").maybe,
            f.flag("final", "It is true if the member ends because of it."),
        ),
    ),
    EventKind("rollout-unusable", "error", "A result cannot be written as a file, so it is not uploaded.", (f.MEMBER, f.ERROR)),
    EventKind(
        "member-retrying",
        "info",
        "A request failed and is repeated.",
        (f.MEMBER, f.ERROR, f.integer("failures", "This many requests failed in a row.")),
    ),
    EventKind("board-refused", "warning", "No trusted key has signed the board.", (f.MEMBER, f.REASON)),
)

SUPERVISED = (
    EventKind(
        "member-started",
        "info",
        "A member was started.",
        (f.MEMBER, f.integer("restarts", "It was started again this many times lately.")),
    ),
    EventKind(
        "member-died",
        "warning",
        "A member ended by itself.",
        (f.MEMBER, f.integer("deaths", "It ended by itself this many times lately."), f.REASON),
    ),
    EventKind(
        "member-given-up",
        "error",
        "A member is not started again.",
        (f.MEMBER, f.REASON, f.flag("permanent", "It is true if starting it again cannot help.")),
    ),
    EventKind(
        "output",
        "info",
        "A reward function or a library printed a line.",
        (f.MEMBER, f.text("line", "This is the line."), f.text("stream", "It went to `stdout` or `stderr`.")),
    ),
    EventKind(
        "output-dropped",
        "warning",
        "The command could not keep up, so lines of a member on Ray were dropped.",
        (f.MEMBER, f.integer("lines", "This many lines were dropped."), f.REASON),
    ),
    EventKind("failed", "error", "An error has ended a member.", (f.MEMBER, f.ERROR, f.REASON)),
)
