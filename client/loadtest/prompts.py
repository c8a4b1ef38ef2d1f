"""Read prompts from a text file or from JSONL, and make requests of them."""

from __future__ import annotations

import base64
import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from loadtest.errors import InputError
from loadtest.record import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEFAULT_NAME = "prompts.txt"
# client/loadtest/prompts.py is in the checkout, or in the folder that an installed wheel has.
CHECKOUT = Path(__file__).resolve().parents[2]
_FIELDS = ("prompt", "messages", "images", "parameters")
_OTHER_FILE = "name another file with --input-prompts"
# A request of `--cancel-rate` is given up after at most so many pieces.
_MOST_PIECES = 16


@dataclass(frozen=True)
class Prompt:
    """What one request asks.

    Attributes:
        text: the prompt; for a chat, the messages as JSON.
        is_chat: whether ``text`` holds messages.
        images: pictures as base64 text.
        parameters: vLLM's ``SamplingParams`` by name, in addition to those of the run.
    """

    text: str
    is_chat: bool = False
    images: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """Prompts without an end, the same ones each time."""

    def __iter__(self) -> Iterator[Prompt]:
        """Yield the prompts from the first one on."""

    @property
    def inputs(self) -> frozenset[str]:
        """Return the names of the model's inputs that the prompts need."""


@dataclass(frozen=True)
class RepeatedPrompts:
    """A list of prompts, again and again."""

    prompts: tuple[Prompt, ...]

    def __iter__(self) -> Iterator[Prompt]:
        """See ``PromptSource``."""
        return itertools.cycle(self.prompts)

    @property
    def inputs(self) -> frozenset[str]:
        """See ``PromptSource``."""
        names = {"messages" if prompt.is_chat else "text_input" for prompt in self.prompts}
        if any(prompt.images for prompt in self.prompts):
            names.add("image")
        return frozenset(names)


def find_prompts(given: Path | None) -> Path:
    """Return the file with the prompts: ``given``, or ``prompts.txt`` here or in the checkout."""
    here = Path(DEFAULT_NAME)
    shipped = CHECKOUT / DEFAULT_NAME
    if given:
        return given
    return shipped if shipped.is_file() and not here.exists() else here


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """Return the prompts of a UTF-8 file: JSONL if it ends in ``.jsonl``, else one prompt a line.

    Raises:
        InputError: the file cannot be read, is not UTF-8, has no prompt, or a line is wrong.
    """
    try:
        # -sig: some editors write a byte order mark, which does not belong to the first prompt.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot read the prompts in {path}: {reason}; {_OTHER_FILE}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"cannot read the prompts in {path}: {error}; save the file as UTF-8"
        ) from error
    # splitlines() would also split at form feeds and at Unicode's separators, which a prompt may
    # contain.
    lines = [line.rstrip("\r") for line in text.split("\n")]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path} holds no prompt; write one prompt a line")
    if path.suffix != ".jsonl":
        return tuple(Prompt(line) for _, line in numbered)
    return tuple(_parse_line(line, path, number) for number, line in numbered)


def _parse_line(line: str, path: Path, number: int) -> Prompt:
    """Return the prompt of a line of JSONL.

    Args:
        line: the line.
        path: the file with the line.
        number: number of the line, from 1.

    Raises:
        InputError: the line is wrong, or one of its pictures cannot be read.
    """
    where = f"{path}, line {number}"
    try:
        value = json.loads(line)
    # Thousands of brackets within each other raise a RecursionError.
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}; write one JSON object a line") from error
    # Both or neither are wrong.
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InputError(f'{where}: write a JSON object with either "prompt" or "messages"')
    if unknown := sorted(value.keys() - set(_FIELDS)):
        raise InputError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(_FIELDS)}")
    is_chat = "messages" in value
    if is_chat and not isinstance(value["messages"], list):
        raise InputError(f'{where}: "messages" must be a list of messages')
    if not is_chat and not isinstance(value["prompt"], str):
        raise InputError(f'{where}: "prompt" must be a string')
    parameters = value.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InputError(f'{where}: "parameters" must be an object of sampling parameters')
    images = value.get("images", [])
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        raise InputError(f'{where}: "images" must be a list of file names')
    return Prompt(
        text=json.dumps(value["messages"]) if is_chat else value["prompt"],
        is_chat=is_chat,
        images=tuple(_read_picture(path.parent / name, where) for name in images),
        parameters=parameters,
    )


def _read_picture(path: Path, where: str) -> str:
    """Return a picture as base64 text.

    Args:
        path: the picture.
        where: file and line that name it, for the message.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{where}: cannot read the picture {path}: {reason}; "
            "names are relative to the file with the prompts"
        ) from error


@dataclass(frozen=True)
class RequestSettings:
    """What all requests of a run have in common.

    Attributes:
        stream: whether the answers come in pieces.
        parameters: vLLM's ``SamplingParams`` by name. A prompt's own value replaces the one here.
        cancel_rate: share of the requests, from 0 to 1, that are given up before they end.
        seed: seed of the random numbers.
    """

    stream: bool
    parameters: Mapping[str, Any]
    cancel_rate: float = 0.0
    seed: int = 0


def make_requests(
    prompts: PromptSource, settings: RequestSettings, *, count: int | None
) -> Iterator[Request]:
    """Yield requests for the prompts.

    Args:
        prompts: the prompts.
        settings: what all requests have in common.
        count: number of requests; None never ends.
    """
    source = random.Random(settings.seed)  # noqa: S311 - nobody must guess it
    numbers = itertools.count() if count is None else range(count)
    for number, prompt in zip(numbers, prompts, strict=False):
        cancelled = source.random() < settings.cancel_rate
        yield Request(
            index=number,
            prompt=prompt.text,
            # Without own parameters, the requests share one object.
            parameters=(
                {**settings.parameters, **prompt.parameters}
                if prompt.parameters
                else settings.parameters
            ),
            stream=settings.stream,
            is_chat=prompt.is_chat,
            images=prompt.images,
            cancel_after=source.randint(1, _MOST_PIECES) if cancelled else None,
        )
