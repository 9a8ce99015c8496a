"""Sends feedback to a gateway, in one line of an application: `send_feedback(url, answer.id, "thumbs", True)`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from ..errors import FeedbackNotStored, RequestMalformed

_TRIES = 4


def send_feedback(
    url: str,
    inference: str | None,
    metric: str,
    value: bool | float | str,
    *,
    episode: str | None = None,
    revision: int = 0,
    tags: Mapping[str, str] | None = None,
    key: str | None = None,
    feedback: str | None = None,
    timeout: float = 60.0,
) -> str:
    """Send feedback, and return its id when the gateway has stored it.

    A request that fails is repeated with the same id, so the feedback counts once. Raises `RequestMalformed` if the gateway refuses it, and
    `FeedbackNotStored` if the gateway cannot be reached or cannot store it.

    Parameters
    ----------
    url
        The address of the gateway.
    inference
        The id of the answer: its `id`, or the header `x-deltawire-inference-id`. None if `episode` is given.
    metric
        The name of the metric.
    value
        True or False, a number, or a text.
    episode
        The id of the episode, if the feedback is about all of it.
    revision
        The highest revision of a metric's feedback counts.
    tags
        Short texts by short names.
    key
        The API key.
    feedback
        The id of the feedback, a UUID. None draws one.
    timeout
        Seconds that one request may take.
    """
    import httpx

    name = feedback or str(uuid.uuid4())
    target = {"inference_id": inference} if episode is None else {"episode_id": episode}
    body: dict[str, Any] = {
        **target,
        "metric_name": metric,
        "value": value,
        "feedback_id": name,
        "revision": revision,
        "tags": dict(tags or {}),
    }
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    reason = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(0.25 * 2**attempt)
        try:
            answer = httpx.post(f"{url.rstrip('/')}/feedback", json=body, headers=headers, timeout=timeout, trust_env=False)
        except (httpx.HTTPError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        if answer.status_code == 200:
            return name
        reason = _why(answer)
        if answer.status_code not in (404, 429) and answer.status_code < 500:  # another gateway's answer is unknown at first
            break
    else:
        raise FeedbackNotStored(f"the gateway at {url} did not store the feedback: {reason}.")
    raise RequestMalformed(f"the gateway at {url} refuses the feedback: {reason}.", hint="")


def _why(answer: Any) -> str:
    try:
        return str(json.loads(answer.content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
