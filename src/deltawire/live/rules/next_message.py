"""Finds the user's next message after an answer, which a judge can turn into a reward."""

from __future__ import annotations

from ...format.interactions import ConversationText


def next_message(earlier: ConversationText, later: ConversationText) -> str | None:
    """Return the message of the user that followed an answer; None if the later conversation does not continue the earlier one.

    Parameters
    ----------
    earlier
        The conversation that ended with the answer.
    later
        A later conversation of the same episode.
    """
    length = len(earlier.messages)
    if later.messages[:length] != earlier.messages or len(later.messages) <= length + 1 or later.messages[length].role != "assistant":
        return None
    return next((message.content for message in later.messages[length + 1 :] if message.role == "user"), None)
