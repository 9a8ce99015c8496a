"""Sends feedback to a gateway, in one line of an application: `send_feedback(url, answer.id, "thumbs", True)`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from .. import errors
from ..errors import FeedbackNotStored, GatewayError, InteractionUnknown, RequestMalformed

_TRIES = 4
_UNKNOWN = InteractionUnknown.__name__


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

    A request that fails is repeated with the same id, so the feedback counts once. If the gateway refuses the feedback, the error that it
    names is raised, such as `InteractionUnknown` or `RequestMalformed`, which is also raised if no gateway can be at the address.
    `FeedbackNotStored` is raised if the gateway cannot be reached or cannot store it.

    Parameters
    ----------
    url
        The address of the gateway, without /v1.
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
    kind = reason = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(0.25 * 2**attempt)
        try:
            answer = httpx.post(f"{url.rstrip('/')}/feedback", json=body, headers=headers, timeout=timeout, trust_env=False)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise RequestMalformed(f"{url!r} is not the address of a gateway: {error}.", hint="Write http://HOST:PORT.") from None
        except (httpx.HTTPError, OSError) as error:
            kind, reason = "", f"{type(error).__name__}: {error}"
            continue
        if answer.status_code == 200:
            return name
        kind, reason = _why(answer)
        if answer.status_code in (404, 405) and kind != _UNKNOWN:
            raise RequestMalformed(f"no gateway answers at {url}: status {answer.status_code}.", hint="Give its address without /v1.")
        if kind != _UNKNOWN and answer.status_code != 429 and answer.status_code < 500:  # another gateway's answer is unknown at first
            break
    else:
        if kind != _UNKNOWN:
            raise FeedbackNotStored(f"the gateway at {url} did not store the feedback: {reason.rstrip('.')}.")
    raise _named(kind)(f"the gateway at {url} refuses the feedback: {reason.rstrip('.')}.", hint="")


def _why(answer: Any) -> tuple[str, str]:
    """Return the name of an error and its message, which ends with what to do. The name is empty if the answer has none."""
    try:
        error = json.loads(answer.content)["error"]
        return str(error["type"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", f"status {answer.status_code}"


def _named(kind: str) -> type[GatewayError]:
    found = getattr(errors, kind, None)
    return found if isinstance(found, type) and issubclass(found, GatewayError) else RequestMalformed
