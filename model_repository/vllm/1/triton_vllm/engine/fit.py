"""Check a request against the model and its limits, before it is tokenized.

Both APIs ask this module. ``gate`` checks a request before it is read, ``cost`` when its tokens are
known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InvalidRequestError, UnsupportedError
from triton_vllm.base.limits import TOKEN_IDS, context_length, refuse_above

if TYPE_CHECKING:
    from collections.abc import Collection

    from triton_vllm.base.limits import Limits
    from triton_vllm.engine.gate import Gate
    from triton_vllm.engine.order import Prompt
    from triton_vllm.vllm_api import Facts

LONGEST_STOP_STRING = 1024
"""Characters of each string of ``stop`` and ``bad_words``."""
# After each token, vLLM compares all patterns in the process that serves all requests. That takes
# up to half as many comparisons. Without a limit, one token took 8 s (20,000 tokens, vLLM 0.32).
MOST_REPETITION = 1 << 15
"""The most that ``max_pattern_size`` squared, times ``min_count``, may be."""
RAISES_N = "MAX_N in the model's config.pbtxt raises that"
PROMPT_NAME = "the prompt"
"""What a prompt is called, if an API has no name of its own for it."""


@dataclass(frozen=True)
class Fit:
    """What a model can take. Each method refuses a request, or returns.

    Attributes:
        facts: what the model can do and take.
        limits: how much a request may ask for.
        gate: knows how much room there is.
    """

    facts: Facts
    limits: Limits
    gate: Gate

    def check_prompt(self, prompt: Prompt) -> None:
        """Refuse a prompt that the model cannot take.

        Raises:
            InvalidRequestError: it is too long, or has token ids outside the vocabulary.
            UnsupportedError: it has pictures, audio or video, and the model takes only text.
        """
        source = prompt.media_source
        if source is not None:
            self.check_media(source)
        self.check_ids(prompt.token_ids or ())
        self.check_text(prompt.characters)

    def check_text(self, characters: int, name: str = PROMPT_NAME) -> None:
        """Refuse a prompt with so many characters that it hardly ever fits.

        Args:
            characters: its length.
            name: what the API calls it.

        Raises:
            InvalidRequestError: it has too many characters.
        """
        # Tokenizing it would take long, only to find that it does not fit.
        tokens = self.facts.max_tokens
        most = tokens * self.limits.max_characters_per_token
        if 0 < most < characters:
            raise InvalidRequestError(
                f"{name} has {characters} characters; {context_length(tokens)}, "
                f"so it takes at most {most} characters"
            )

    def check_ids(self, ids: Collection[int], name: str = PROMPT_NAME) -> None:
        """Refuse a prompt whose token ids are too many, or would stop the engine.

        Args:
            ids: the token ids.
            name: what the API calls the prompt.

        Raises:
            InvalidRequestError: the text says which.
        """
        tokens = self.facts.max_tokens
        if 0 < tokens < len(ids):
            raise InvalidRequestError(f"{name} has {len(ids)} tokens; {context_length(tokens)}")
        # Multimodal models use ids above their vocabulary as placeholders of pictures, so for them
        # the limit is unknown.
        vocabulary = 0 if self.facts.multimodal else self.facts.vocabulary
        _refuse_outside(vocabulary, ids, name)

    def check_media(self, source: str) -> None:
        """Refuse pictures, audio or video in ``source``, if the model takes only text.

        Raises:
            UnsupportedError: the model takes only text.
        """
        if not self.facts.multimodal:
            raise UnsupportedError(f"{source}: this model takes texts only")

    def check_weight(self, count: int, what: str, unit: str, *, counted: int = 0) -> None:
        """Refuse more inputs and completions than there is room for.

        Args:
            count: all inputs and completions of the request together.
            what: the beginning of the sentence "embedding_request has 9 inputs".
            unit: the unit of ``count``.
            counted: how many of them the ledger has already.

        Raises:
            InvalidRequestError: there will never be so much room, however long the client waits.
            UnavailableError: there is no room now.
        """
        # The gate had room for the first one when it let the request in.
        if count > max(counted, 1):
            refuse_above(self.limits.max_requests_in_flight, count, what, unit)
            self.gate.require_room(count - counted, unit)

    def check_params(self, params: Any) -> None:
        """Refuse parameters that ask for too much, or harm other requests.

        Args:
            params: vLLM's SamplingParams or PoolingParams.

        Raises:
            InvalidRequestError: the text names the parameter and the limit.
            UnsupportedError: ``prompt_logprobs`` for an engine that does not survive it.
        """
        limits = self.limits
        n = getattr(params, "n", None) or 1
        # For a single completion, the model's length is the limit.
        if n > 1:
            what = "sampling parameters: n must be smaller, it is"
            refuse_above(self._most_completions(), n, what, remedy=RAISES_N)
            tokens = n * (getattr(params, "max_tokens", None) or self.facts.max_tokens)
            text = "sampling parameters: n times max_tokens are"
            refuse_above(limits.max_answer_tokens, tokens, text, "tokens")
        for name in ("logprobs", "prompt_logprobs"):
            self.check_logprobs(name, getattr(params, name, None))
        interval = getattr(params, "stream_interval", None) or 0
        text = "sampling parameters: stream_interval must be smaller, it is"
        refuse_above(limits.max_stream_interval, interval, text)
        for name in ("stop", "bad_words"):
            self._check_strings(name, getattr(params, name, None) or ())
        if getattr(params, "prompt_logprobs", None) is not None and not self.facts.prompt_logprobs:
            raise UnsupportedError(
                "prompt_logprobs: vLLM on a CPU cannot compute them for a model with enable_lora"
            )
        for name in TOKEN_IDS:
            self.check_token_ids(name, getattr(params, name, None) or ())
        _check_repetition(getattr(params, "repetition_detection", None))

    def share(self) -> int:
        """Return how many of the engine's seats one request may take at a time; 0 means no limit.

        A seat is one of the ``max_num_seqs`` completions that vLLM works on at the same time.
        """
        most = self._most_completions()
        # An operator who allows few completions does not want to slow long lists of prompts down.
        return max(most, self._half_of_seats()) if most else 0

    def _most_completions(self) -> int:
        """Return how many completions a request may have; 0 means no limit."""
        most = self.limits.max_n
        return self._half_of_seats() if most is None else most

    def _half_of_seats(self) -> int:
        """Return half of the engine's seats; 0 if vLLM does not say how many it has."""
        # On two cores, 128 completions of 1,000 tokens took all of the engine's 128 seats, and
        # another client waited 18 s for its first token. Next to 100 it waited 0.1 s.
        seats = self.facts.seats
        return max(seats // 2, 1) if seats else 0

    def check_logprobs(self, name: str, count: int | None) -> None:
        """Refuse to compute so many log probabilities for each token.

        Raises:
            InvalidRequestError: the text has the parameter's name and the limit.
        """
        most = self.limits.max_logprobs
        # -1 asks vLLM for all tokens of the vocabulary.
        if count == -1 and most:
            raise InvalidRequestError(
                f"sampling parameters: {name} must be at most {most}, not -1 for all"
            )
        refuse_above(most, count or 0, f"sampling parameters: {name} must be smaller, it is")

    def check_token_ids(self, name: str, ids: Collection[int]) -> None:
        """Refuse a parameter's token ids outside the model's vocabulary.

        Raises:
            InvalidRequestError: there is such an id. The text begins with ``name``.
        """
        _refuse_outside(self.facts.vocabulary, ids, name)

    def _check_strings(self, name: str, words: str | Collection[str]) -> None:
        """Refuse too many strings, or too long ones, of ``stop`` or ``bad_words``."""
        if isinstance(words, str):
            words = [words]
        what = f"sampling parameter '{name}' has"
        refuse_above(self.limits.max_stop_strings, len(words), what, "strings")
        longest = max(map(len, words), default=0)
        refuse_above(LONGEST_STOP_STRING, longest, f"{what} a string of", "characters")


def _refuse_outside(vocabulary: int, ids: Collection[int], name: str) -> None:
    """Refuse token ids that are negative or not in the vocabulary.

    Args:
        vocabulary: its number of tokens. 0 means unknown.
        ids: the token ids. There may be none.
        name: what the request calls them, for the error.

    Raises:
        InvalidRequestError: there is such an id.
    """
    # A prompt may have a hundred thousand ids, and these two functions loop in C.
    for token in (min(ids), max(ids)) if ids else ():
        if token < 0:
            raise InvalidRequestError(f"{name}: token id {token} is negative")
        if 0 < vocabulary <= token:
            raise InvalidRequestError(
                f"{name}: token id {token} is not in the model's vocabulary of {vocabulary} tokens"
            )


def _check_repetition(wanted: Any) -> None:
    """Refuse a search for repetitions that costs too much for each token.

    Args:
        wanted: the parameter ``repetition_detection``. None if the request has none.

    Raises:
        InvalidRequestError: the text has the cost and the limit.
    """
    size = getattr(wanted, "max_pattern_size", 0)
    cost = size * size * getattr(wanted, "min_count", 0)
    if cost > MOST_REPETITION:
        raise InvalidRequestError(
            f"repetition_detection: max_pattern_size {size} squared, times min_count, is {cost}; "
            f"this model takes at most {MOST_REPETITION}"
        )
