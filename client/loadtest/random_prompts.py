"""Make up prompts of about a given length in tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

# Common English words. In most vocabularies, each of them with its space is one token. The client
# has no tokenizer; the report has the number of tokens that the server counted.
_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who will "
    "no more if out so up said what its about than into them can only other time new some could "
    "these two may first then do any like my now over such our man me even most made after also "
    "did many before must through back years where much your way well down should because long "
    "each just state those people too little world very good still under work own last house city"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class RandomPrompts:
    """Prompts of random words: all begin with the same prefix, and no two are the same.

    They are made when they are needed: many long ones would fill the memory.

    Attributes:
        words: number of words after the prefix, each about one token.
        prefix_words: number of words with which all prompts begin. A prefix cache may hold them.
        seed: seed of the random numbers.
    """

    words: int
    prefix_words: int = 0
    seed: int = 0

    def __iter__(self) -> Iterator[Prompt]:
        """See ``PromptSource``."""
        source = random.Random(self.seed)  # noqa: S311 - nobody must guess it
        prefix = source.choices(_WORDS, k=self.prefix_words)
        while True:
            yield Prompt(" ".join([*prefix, *source.choices(_WORDS, k=self.words)]))

    @property
    def inputs(self) -> frozenset[str]:
        """See ``PromptSource``."""
        return frozenset({"text_input"})
