"""Find the parameter of ours that an unknown name in config.pbtxt most likely means."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# 0.75 takes FLGHT for FLIGHT and TOOKS for TOOLS, but not OUTPUTS for INPUTS or LOG for LORA.
_WORDS_ALIKE = 0.75
"""From this ratio of difflib on, one word is the other one with a typing error."""
_NAMES_ALIKE = 0.91
"""Above this ratio, the same for whole names without separators: words may be joined or split."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` misspells, or None if it is another program's name.

    These are misspellings: other separators or case, typing errors, abbreviated words (``LORA_DIR``
    and ``ENGINE_TIMEOUT_S``), and a missing word (``ENGINE_TIMEOUT``), but not the first one.
    """
    words = _words(name)
    near = [other for other in known if _is_near(words, _words(other))]
    return max(near, key=lambda other: _ratio(words, _words(other)), default=None)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word]


def _is_near(words: list[str], ours: list[str]) -> bool:
    """Return whether the words of a name misspell the words of one of our names.

    One of three rules must hold.
    """
    # 1) The whole names are nearly equal.
    if _ratio(words, ours) > _NAMES_ALIKE:
        return True
    # 2) There are as many words, and each resembles its counterpart. With a single word, a part of
    #    it would be enough, which says too little.
    if len(words) == len(ours) > 1:
        return all(map(_are_alike, words, ours))
    # 3) One word is missing, but not the first: TIMEOUT_SECONDS without ENGINE may be anybody's.
    #    Nor may only one word be left. MAX does not count: other programs have a MAX_TOKENS, too.
    shorter = [ours[:place] + ours[place + 1 :] for place in range(1, len(ours))]
    words_but_max = [word for word in words if word != "MAX"]
    return len(words_but_max) > 1 and words in shorter


def _are_alike(word: str, our: str) -> bool:
    """Return whether ``word`` abbreviates or extends our word, or has a typing error."""
    if our.startswith(word) or word.startswith(our):
        return True
    return difflib.SequenceMatcher(None, word, our).ratio() >= _WORDS_ALIKE


def _ratio(words: list[str], ours: list[str]) -> float:
    """Return how similar two names are without their separators, from 0 to 1."""
    return difflib.SequenceMatcher(None, "".join(words), "".join(ours)).ratio()
