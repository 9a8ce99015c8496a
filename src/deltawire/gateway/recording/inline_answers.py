"""Token ids and log-probs inside an answer, from a vLLM server without our middleware. The caller does not see them unless it asked.

`InlineAnswer` collects them from a whole answer or from the events of a stream, and removes them. It gives the same form as the answers
that other engines keep (`engines.answer_table`), but without the labels of weights.
"""

from __future__ import annotations

from typing import Any

from ..http.requests import AskedFor

_MOST_TOKENS = 1 << 21
"""The most tokens of an answer. A longer one is not recorded."""


_PER_TOKEN = 64


class InlineAnswer:
    """The tokens that an answer tells about.

    Parameters
    ----------
    asked
        The request.
    """

    def __init__(self, asked: AskedFor) -> None:
        self._asked = asked
        self._prompts: dict[int, list[int]] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._room = _MOST_TOKENS
        self._keeps_logprobs = asked.body.get("logprobs") is not None and asked.body["logprobs"] is not False  # 0 asks for them
        self._keeps_tokens = asked.body.get("return_token_ids") is True

    def take(self, value: Any) -> Any:
        """Note the tokens of a whole answer, or of an event, and return it as the caller may see it."""
        choices = value.get("choices") if isinstance(value, dict) else None
        if not isinstance(choices, list):
            return value
        self._note_prompt(0, value)
        for choice in choices:
            if isinstance(choice, dict):
                self._take_choice(choice)
        if not self._keeps_tokens:
            value.pop("prompt_token_ids", None)
        return value

    def calls(self) -> list[dict[str, Any]]:
        """Return what the engine drew, as `engines.answer_table` describes it. The list is empty if there was too much."""
        if self._room < 0:
            return []
        temperature, top_p = self._asked.number("temperature"), self._asked.number("top_p")
        per_prompt, calls = self._asked.choices, []
        for number in range(0, len(self._choices), per_prompt):
            chosen = [self._choices[index] for index in range(number, number + per_prompt) if index in self._choices]
            prompt = self._prompts.get(number, self._prompts.get(0))
            calls.append({"prompt_token_ids": prompt, "choices": chosen, "temperature": temperature, "top_p": top_p})
        return calls

    def _note_prompt(self, index: int, holder: dict[str, Any]) -> None:
        tokens = holder.get("prompt_token_ids")
        if isinstance(tokens, list) and self._fits(tokens):
            self._prompts[index] = tokens

    def _fits(self, values: list[Any]) -> bool:
        size = 1 + len(values)  # an empty list takes memory as well
        self._room = self._room - size if self._asked.memory.fits(_PER_TOKEN * size) else -1
        return self._room >= 0

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index", 0)
        if type(index) is not int or not 0 <= index < 1 << 16:
            return
        blank = {"index": index, "token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": None}
        found = self._choices.setdefault(index, blank)
        self._note_prompt(index, choice)
        tokens, told = choice.get("token_ids"), choice.get("logprobs")
        if isinstance(tokens, list) and self._fits(tokens):
            found["token_ids"] += tokens
        if isinstance(told, dict):
            content = told.get("content")
            drawn = told.get("token_logprobs")
            if isinstance(content, list):
                drawn = [each.get("logprob") for each in content if isinstance(each, dict)]
            if isinstance(drawn, list) and self._fits(drawn):
                found["logprobs"]["token_logprobs"] += drawn
        found["finish_reason"] = choice.get("finish_reason") or found["finish_reason"]
        if not self._keeps_tokens:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        if not self._keeps_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
