"""Turns answers into interactions: pure functions over plain values, which the journal keeps as JSON.

An *intent* says that an answer was given. Together with what the engine drew ("calls", see `engines.answer_table`) it becomes a *row*: the
completions of one request. A file of interactions is made from many rows.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ...chain.version import Version
from ...engines.routed_experts import ModelRouters, read_captured_experts, read_vllm_experts
from ...engines.sampling_changes import DEFAULTED, changed_by, not_named
from ...engines.vllm.driver.token_route import LabelledTokens, read_choice
from ...errors import CorruptInteractions, EngineError
from ...events import OnEvent
from ...fleet.member_routing import join_routing
from ...format.interactions import (
    MAX_MESSAGES,
    MAX_MODEL_NAME,
    MAX_TEXT,
    MAX_WORD,
    AnswerFacts,
    ConversationText,
    Interaction,
    Interactions,
    Message,
)
from ...format.records.canonical import Fields
from ...format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from ...format.routing import RecordedExperts, RoutingLayout
from ..http.requests import AskedFor
from ..options import Redact
from .answer_text import ChoiceText, is_all_text, other_parts, read_answer, request_messages, tool_names
from .redaction import redacted as ask_redaction

_SUFFIX = re.compile(r"-(\d{1,6})$")
_MOST_NAMES, _LONGEST_NAME = 20, 40
_REDACTED = "the function for redaction has changed the text or does not see all of it, so its tokens are not recorded"


def intent_of(asked: AskedFor, *, engine: str, seq: int | None, channel: str | None, user: str | None) -> dict[str, Any]:
    """Return the intent of a request.

    Parameters
    ----------
    asked
        The request.
    engine
        The address of the engine.
    seq
        The version that the engine had when it got the request.
    channel
        The channel of the engine.
    user
        The hash of the user.
    """
    return {
        "id": asked.id,
        "time": asked.time,
        "route": asked.route,
        "model": _printable(asked.model),
        "train": asked.train,
        "temperature": asked.number("temperature"),
        "top_p": asked.number("top_p"),
        "changed_by": changed_by(asked.body),
        "other_parts": [_printable(kind) for kind in other_parts(asked.body)[:_MOST_NAMES]],
        "not_named": not_named(asked.body),
        "choices": asked.choices,
        "episode": asked.episode,
        "user": user,
        "channel": channel,
        "diverted_from": None if asked.channel == channel else asked.channel,
        "caller": asked.caller.name,
        "tags": asked.tags,
        "engine": engine,
        "seq": seq,
    }


class Unusable(Exception):
    """An answer cannot be recorded. The text says why."""


def row_of(
    intent: Mapping[str, Any],
    calls: Any,
    *,
    logprobs: str | None,
    oldest: int | None,
    asked: AskedFor | None = None,
    copies: Sequence[bytes] = (),
    redact: Redact | None = None,
    keeps_text: bool = False,
    routers: Callable[[], ModelRouters | None] = lambda: None,
    on_untrained: Callable[[str], object] = lambda reason: None,
) -> dict[str, Any]:
    """Return the row of an answer. Raises `Unusable` if there is nothing to record, or if what the engine says cannot be used, and
    `RedactionFailed`.

    Parameters
    ----------
    intent
        What the gateway knew when it gave the answer.
    calls
        What the engine drew.
    logprobs
        The kind of its log-probs.
    oldest
        The oldest version that the engine had since it got the request. It is used for tokens without a label.
    asked, copies
        The request and the bytes of the answer. Without them the row has no text, and of the facts it has the length alone.
    redact
        Decides what is recorded.
    keeps_text
        Whether the row has the text of the conversation.
    routers
        Returns the routers of the model. It is asked only if the engine recorded experts.
    on_untrained
        Called with the reason for each interaction that must not be trained on, although its user agrees.
    """
    if redact is not None and asked is None:
        raise Unusable("the gateway ended before the function for redaction was asked, and no longer has the text.")
    texts = {} if asked is None else read_answer(intent["route"], copies)
    tools = frozenset[str]() if asked is None else tool_names(asked.body)
    if not isinstance(calls, list) or not calls or (len(calls) > 1 and intent["route"] != "completions"):
        raise Unusable("the engine drew several answers, or none, for one prompt.")
    row: dict[str, Any] = {"interactions": [], "prompts": [], "completions": []}
    try:
        if len(calls) > 1:
            calls = sorted(calls, key=lambda call: int(found[1]) if (found := _SUFFIX.search(str(call.get("request_id")))) else 0)
        for number, call in enumerate(calls):
            prompt = _ids(call["prompt_token_ids"])
            drawn = [_read(choice) for choice in call["choices"]]
            if len(drawn) > int(intent["choices"]):  # they would be taken for answers to the next prompt
                raise Unusable("the engine drew more answers than the request asks for.")
            places: dict[bool, int] = {}
            for index, each in enumerate(drawn):
                if not each.tokens:
                    continue
                choice = number * int(intent["choices"]) + index
                problem = _sampling_problem(intent, call, logprobs)
                one = _interaction(intent, call, choice, each, texts.get(choice), tools, problem is None)
                redacted = _redacted(one, asked, number, texts.get(choice), redact, keeps_text)
                if redacted is None:
                    continue
                kept, keeps_tokens = redacted
                if not keeps_tokens:
                    problem = _REDACTED
                if intent["train"] and problem is not None:
                    on_untrained(problem)
                if keeps_tokens not in places:
                    places[keeps_tokens] = len(row["prompts"])
                    row["prompts"].append(_packed(prompt if keeps_tokens else [0], "<i4"))
                row["interactions"].append(kept.plain())
                made = _completion(places[keeps_tokens], each, oldest, routers, len(prompt), keeps_tokens=keeps_tokens)
                row["completions"].append(made)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, EngineError) as error:
        raise Unusable(f"what the engine drew cannot be read: {error!r:.300}.") from None
    if not row["completions"]:
        raise Unusable("nothing of the answer may be recorded, or it has no tokens.")
    return row


def file_of(
    session: str,
    number: int,
    run: str,
    rows: Sequence[Mapping[str, Any]],
    version: Callable[[int], Version],
    *,
    on_event: OnEvent | None = None,
) -> Interactions:
    """Return a file of interactions. Raises `CorruptInteractions` if a row cannot be read, and what `version` raises.

    Parameters
    ----------
    session
        The session of the gateway.
    number
        The number of the file.
    run
        The id of the run.
    rows
        The rows.
    version
        Returns the version in a commit.
    on_event
        Called with events about routing.
    """
    interactions: list[Interaction] = []
    prompts: list[NDArray[np.int32]] = []
    completions: list[Completion] = []
    experts: list[RecordedExperts | None] = []
    try:
        for row in rows:
            first = len(prompts)
            interactions += [Interaction.of(Fields(dict(each), "interactions")) for each in row["interactions"]]
            prompts += [_unpacked(each, "<i4") for each in row["prompts"]]
            for prompt, tokens, logprobs, spans, finished, routing in row["completions"]:
                is_withheld = isinstance(tokens, int)
                drawn = np.zeros(tokens, np.int32) if is_withheld else _unpacked(tokens, "<i4")
                completions.append(
                    Completion(
                        prompt=first + prompt,
                        tokens=drawn,
                        logprobs=np.zeros(tokens, np.float32) if is_withheld else _unpacked(logprobs, "<f4"),
                        mask=np.full(len(drawn), not is_withheld, np.uint8),
                        rewards=(),
                        spans=tuple(TokenSpan(*span) for span in spans),
                        finished=finished,
                    )
                )
                experts.append(None if routing is None else _experts(routing))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptInteractions(f"a row of the journal cannot be read: {error!r:.200}.") from None
    found = {seq: version(seq) for seq in sorted({span.seq for one in completions for span in one.spans})}
    rollouts = Rollouts(
        run,
        0,
        0,
        0,
        member=session,
        nonce=blake3(session.encode()).hexdigest()[:32],
        prompts=tuple(prompts),
        completions=tuple(completions),
        reward_names=(),
        versions={seq: ClaimedVersion(each.step or 0, each.digest) for seq, each in found.items()},
        routing=join_routing(prompts, completions, experts, on_event=on_event),
    )
    return Interactions(number, tuple(interactions), rollouts)


def _read(choice: Any) -> LabelledTokens:
    reason = choice["finish_reason"]
    return read_choice({**choice, "finish_reason": "stop" if reason in ("tool_calls", "function_call") else reason})


def _sampling_problem(intent: Mapping[str, Any], call: Mapping[str, Any], logprobs: str | None) -> str | None:
    """Return why an answer was not drawn as training assumes, or None if it was."""
    if parts := intent.get("other_parts"):  # the journals of older gateways do not have it
        return f"the recorded tokens are not the whole prompt, which has parts of the kind {', '.join(parts)}"
    changed, missing = call.get("changed_by"), []
    if changed is None:  # the engine does not tell, so the request decides
        changed, missing = intent.get("changed_by", ()), intent.get("not_named", DEFAULTED)
    if changed:
        names = ", ".join(_printable(str(name))[:_LONGEST_NAME] for name in list(changed)[:_MOST_NAMES])
        return f"its tokens were not drawn by temperature and top_p alone: the request, or the engine, uses {names}"
    if missing:
        return f"the engine does not tell its defaults, and the request does not name {', '.join(missing)}"
    if logprobs != "processed_logprobs" and _temperature_and_top_p(intent, call) != (1.0, 1.0):
        return "the engine's log-probs do not include temperature and top_p; start vLLM with --logprobs-mode processed_logprobs"
    return None


def _temperature_and_top_p(intent: Mapping[str, Any], call: Mapping[str, Any]) -> tuple[float, float]:
    temperature, top_p = (float(intent[name] if call.get(name) is None else call[name]) for name in ("temperature", "top_p"))
    return temperature, top_p


def _interaction(
    intent: Mapping[str, Any],
    call: Mapping[str, Any],
    choice: int,
    drawn: LabelledTokens,
    text: ChoiceText | None,
    tools: frozenset[str],
    is_exact: bool,
) -> Interaction:
    temperature, top_p = _temperature_and_top_p(intent, call)
    facts = AnswerFacts(len(drawn.tokens), has_text=False) if text is None else text.facts(len(drawn.tokens), tools)
    return Interaction(
        id=intent["id"],
        time=intent["time"],
        route=intent["route"],
        model=intent["model"],
        finish=_printable((text and text.finish) or ("stop" if drawn.finished else "length"))[:MAX_WORD],
        train=bool(intent["train"]) and is_exact,  # tokens and log-probs of another distribution would spoil training
        temperature=temperature,
        top_p=top_p,
        facts=facts,
        episode=intent["episode"],
        choice=choice,
        user=intent["user"],
        channel=intent["channel"],
        caller=intent["caller"],
        tags=intent["tags"],
        diverted_from=intent.get("diverted_from"),  # the journals of older gateways do not have it
    )


def _redacted(
    one: Interaction, asked: AskedFor | None, number: int, text: ChoiceText | None, redact: Redact | None, keeps_text: bool
) -> tuple[Interaction, bool] | None:
    """Return what may be recorded, and whether this includes the tokens. Without the text a user's function cannot decide: nothing is."""
    if redact is None and not keeps_text:
        return one, True
    if asked is None or text is None:
        return None if redact is not None else (one, True)
    conversation = request_messages(asked.body, number)
    shown: Mapping[str, Any] | None
    shown = {
        "messages": [{"role": role, "content": content} for role, content in conversation],
        "answer": text.text,
        "tags": dict(one.tags),
        "route": one.route,
        "model": one.model,
    }
    shown = shown if redact is None else ask_redaction(redact, shown)
    if shown is None:
        return None
    found, answer = [(str(each["role"]), str(each["content"])) for each in shown["messages"]], str(shown["answer"])
    kept = tuple(Message(_printable(role)[:MAX_WORD] or "-", content) for role, content in found)
    fits = 1 <= len(kept) <= MAX_MESSAGES and sum(len(each.content) for each in kept) + len(answer) <= MAX_TEXT
    is_same = (found, answer) == (conversation, text.text) and not text.has_more and is_all_text(asked.body, number)
    keeps_tokens = redact is None or bool(shown.get("tokens", is_same))
    values = {name: getattr(one, name) for name in one.__dataclass_fields__}
    values["model"] = _printable(str(shown.get("model") or "-"))[:MAX_MODEL_NAME]
    values |= {"tags": dict(shown["tags"]), "train": one.train and keeps_tokens and bool(shown.get("train", True))}
    if keeps_text and fits:
        values["text"] = ConversationText(kept, answer)
    return Interaction(**values), keeps_tokens


def _completion(
    prompt: int,
    drawn: LabelledTokens,
    oldest: int | None,
    routers: Callable[[], ModelRouters | None],
    prompt_tokens: int,
    *,
    keeps_tokens: bool,
) -> list[Any]:
    """Return a completion as a list for the journal. Without its tokens, it has only their number."""
    if drawn.spans is not None:
        spans = [[span.start, span.end, _seq(span.label)] for span in drawn.spans if span.end > span.start]
    elif oldest is not None:
        spans = [[0, len(drawn.tokens), oldest]]
    else:
        raise ValueError("the engine does not tell which version it has")
    if not keeps_tokens:
        return [prompt, len(drawn.tokens), None, spans, drawn.finished, None]
    routing = None
    if drawn.experts is not None and (known := routers()) is not None:
        read = read_captured_experts if isinstance(drawn.experts, dict) else read_vllm_experts
        recorded = read(drawn.experts, known, prompt_tokens + len(drawn.tokens))
        layout = recorded.layout
        routing = [[layout.experts, layout.top_k, list(layout.layers)], list(recorded.experts.shape), _packed(recorded.experts, "<i2")]
    return [prompt, _packed(_ids(drawn.tokens), "<i4"), _packed(drawn.logprobs, "<f4"), spans, drawn.finished, routing]


def _experts(routing: Sequence[Any]) -> RecordedExperts:
    (experts, top_k, layers), shape, data = routing
    return RecordedExperts(RoutingLayout(experts, top_k, tuple(layers)), _unpacked(data, "<i2").reshape(shape))


def _seq(label: str) -> int:
    if not (label.isascii() and label.isdigit() and len(label) < 20):
        raise ValueError(f"the weights have the label {label[:40]!r}, which is not a version")
    return int(label)


def _ids(tokens: Any) -> list[int]:
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
        raise ValueError("token ids are not a list of numbers")
    return tokens


def _packed(values: Any, dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def _unpacked(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
