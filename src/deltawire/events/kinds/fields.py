"""The fields that several kinds of events share. A name means the same in all of them."""

from __future__ import annotations

from .kind import Field


def integer(name: str, meaning: str, unit: str = "") -> Field:
    """Return a field with whole numbers."""
    return Field(name, "integer", meaning, unit)


def number(name: str, meaning: str, unit: str = "") -> Field:
    """Return a field with numbers."""
    return Field(name, "number", meaning, unit)


def text(name: str, meaning: str) -> Field:
    """Return a field with text."""
    return Field(name, "text", meaning)


def flag(name: str, meaning: str) -> Field:
    """Return a field that is true or false."""
    return Field(name, "flag", meaning)


def seconds(name: str, meaning: str) -> Field:
    """Return a field with a duration."""
    return number(name, meaning, "seconds")


def size(name: str, meaning: str) -> Field:
    """Return a field with a number of bytes."""
    return integer(name, meaning, "bytes")


SEQ = integer("seq", "This is the number of the commit.")
UPDATES = integer("updates", "This is the number of the version, which people use.")
STEP = integer("step", "This is the trainer's step.")
EPOCH = integer("epoch", "This is the number of the publisher or trainer: each one that takes over has a higher one.")
BASE = integer("base", "A skip or a hop leads on from this commit.")
BYTES = size("bytes", "These are the bytes that were stored, fetched or deleted.")
STATE_BYTES = size("state_bytes", "This is the size of all weights.")
CHANGED = integer("changed", "This many weights have another value than in the version before.", "weights")
UPLOAD_SECONDS = seconds("upload_seconds", "The upload took this long.")
APPLY_SECONDS = seconds("apply_seconds", "Writing the weights took this long.")
WAIT_SECONDS = seconds("wait_seconds", "Waiting for something else took this long.")
SECONDS = seconds("seconds", "It took this long.")
HOPS = integer("hops", "The route has this many hops.")
TOKENS = integer("tokens", "This is the number of tokens.", "tokens")
KIND = text("kind", "This is the kind of commit (`delta`, `anchor`, `rewind`), or of shortcut (`anchor`, `skip` or others).")
REASON = text("reason", "This text says why, for people.")
TRACE = text("trace", "This is the context of the version's trace, in the form of W3C's traceparent.").maybe
ERROR = text("error", "This is the class of the error, or its text.")
WHY = text("why", "This text says why, for people.")
MESSAGE = text("message", "This text says what is wrong and what to do.")
RETRYABLE = flag("retryable", "It is 1 if another attempt may succeed, and is made.")
KEY = text("key", "This is the key of an object in the store.")
FILES = text("files", "These are the names of the files, separated by commas.")
MEMBER = text("member", "This is the name of the member.")
READER = text("reader", "This is the name of the reader.")
ENGINE = text("engine", "This is the name of the engine.")
ROUND = integer("round", "This is the number of the round.")
TASK = integer("task", "This is the number of the task in its round.")
ATTEMPT = integer("attempt", "This is the number of the attempt: at a task, or at a request.")
CHANNEL = text("channel", "This is the name of the channel.")
RELAY = text("relay", "This is the URL of the copy.")
ADAPTER = text("adapter", "This is the name of the LoRA adapter.")
FLOOR = integer("floor", "Commits before this one are no longer needed.")
TASKS = integer("tasks", "The round has this many tasks.")
RESULTS = integer("results", "This is the number of results.")
STATE = text("state", "This is the state that an engine or a member reports of itself.")
TENSORS = integer("tensors", "This is the number of tensors.")
ELEMENTS = integer("elements", "This is the number of weights.", "weights")
RECIPE = text("recipe", "This is the recipe that quantises the weights.")
LARGEST = number("largest", "This is the largest difference of log-probs.", "nats")
MEAN = number("mean", "This is the mean difference of log-probs.", "nats")
LAG = number("lag", "Readers count the versions that they are behind, and trainers the mean steps that the policy was behind.")
REWARDS = text("rewards", "These are the names of the member's reward functions, separated by commas.")
