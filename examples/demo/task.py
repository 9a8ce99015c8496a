"""The demo's task: continue a line of deltawire's documentation with words that exist.

`python examples/demo/task.py` prints some prompts, and the rewards of two completions of each.
"""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LETTERS = "\n !\"#$%&'()*+,-./0123456789:;<=>?@[]_`abcdefghijklmnopqrstuvwxyz|"
PROMPT_LETTERS = 16


@cache
def text() -> str:
    """Return the prose of the documentation in lower case, without tables and code."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = "\n".join(re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL) for file in files).lower().splitlines()
    prose = "\n".join(line.strip() for line in lines if line.strip() and not line.startswith(("|", "    ")))
    return "".join(letter for letter in prose if letter in LETTERS)


@cache
def vocabulary() -> frozenset[str]:
    """Return the words of the documentation that have three letters or more."""
    return frozenset(re.findall(r"[a-z]{3,}", text()))


def known_words(completions: list[str], **_: Any) -> list[float]:
    """Return the reward: the share of a completion's letters that are in different words of the documentation.

    A repeated word earns nothing, so a completion of many "the" gets a low reward. The last word may be cut off, and does not count.
    """
    rewards = []
    for completion in completions:
        words = re.findall(r"[a-z]+", completion)[:-1]
        rewards.append(sum(len(word) for word in vocabulary().intersection(words)) / max(1, len(completion)))
    return rewards


def rows() -> list[dict[str, str]]:
    """Return the dataset: the beginnings of all lines that are long enough."""
    return [{"prompt": line[:PROMPT_LETTERS]} for line in text().splitlines() if len(line) >= 4 * PROMPT_LETTERS]


def tokenizer() -> Any:
    """Return a tokenizer with one token per letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, clean_up_tokenization_spaces=False
    )  # no special tokens, because decoding leaves them out


def main() -> None:
    for row in random.Random(0).sample(rows(), 3):
        for completion in (" the store and its chain ", " teh stroe adn ist cahin "):
            print(f"{row['prompt']!r} {completion!r}: {known_words([completion])[0]:.2f}")


if __name__ == "__main__":
    main()
