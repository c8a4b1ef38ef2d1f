"""A separate process that compiles constraints of requests once, to see what that costs.

The environment's interpreter runs this file as a script. Its standard input is a Unix socket that
delivers connections. It reads the tokenizer from the first connection. Each further connection is a
constraint, for which it forks.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COMPILERS: Mapping[str, tuple[str, str]] = {
    "json": ("from_json_schema", "compile_json_schema"),
    "regex": ("from_regex", "compile_regex"),
    "grammar": ("from_ebnf", "compile_grammar"),
    "lark": ("from_lark", "compile_lark"),
    "structural_tag": ("from_structural_tag", "compile_structural_tag"),
}
"""xgrammar's functions to read a constraint and to compile it.

vLLM reads it in the event loop, and compiles it in EngineCore.
"""
# If a grammar can be read in many ways, each token takes long and delays all other requests.
TOKENS = 16
"""How many tokens of an answer are tried as well."""
DONE = b"done"
"""The first bytes of each answer. Why a constraint cannot be used follows them, if it cannot."""
# Some errors begin with a time and a place in xgrammar's sources.
_PLACE = re.compile(r"^(?:\[[\d:]+\] )?(?:\S+\.(?:cc|h):\d+: )?")
LONGEST = 400
"""Characters of a refusal."""


class DeadEndError(Exception):
    """No token of the vocabulary continues or ends an answer."""


def serve(control: socket.socket) -> None:
    """Take connections until the other end is closed."""
    # This makes the kernel remove forks that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    xgrammar = importlib.import_module("xgrammar")
    tokenizer = None
    while (connection := _receive(control)) is not None:
        with connection:
            if tokenizer is None:
                tokenizer = xgrammar.TokenizerInfo.deserialize_json(_read(connection))
                connection.sendall(DONE)
            elif os.fork() == 0:
                # If this process exceeds its limits, it ends without an answer, and nothing else
                # ends with it.
                try:
                    refusal = _attempt(xgrammar, tokenizer, json.loads(_read(connection)))
                    connection.sendall(DONE + refusal.encode(errors="replace"))
                finally:
                    os._exit(0)


def _attempt(xgrammar: Any, tokenizer: Any, task: Mapping[str, Any]) -> str:
    """Compile a constraint; the kernel ends the process if that takes too long.

    Returns:
        Why it cannot be used; empty if it can.

    Raises:
        MemoryError: compiling takes too much memory.
    """
    # 1) Limit the memory. The limit is for the whole process, so its present size is added.
    status = Path("/proc/self/status").read_text("utf-8")
    used = int(re.findall(r"VmData:\s*(\d+)", status)[0]) << 10
    most = used + task["bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    # 2) Limit the time. The timer counts the processor time of all threads. The signal's default
    # action ends the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, task["read_s"])
    # 3) Do what vLLM would do with the constraint.
    read, compile_ = COMPILERS[task["kind"]]
    refusal = ""
    try:
        arguments = _arguments(xgrammar, task["kind"], task["text"])
        getattr(xgrammar.Grammar, read)(*arguments)
        signal.setitimer(signal.ITIMER_PROF, task["compile_s"])
        compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=2)
        _answer(xgrammar, tokenizer, getattr(compiler, compile_)(*arguments))
    # The classes of xgrammar's own errors.
    except (RuntimeError, ValueError) as error:
        # C++ has no memory left.
        if "bad_alloc" in str(error):
            raise MemoryError from None
        refusal = f"is refused by xgrammar: {_sentence(error)}"
    except DeadEndError as error:
        refusal = str(error)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001, S110
        # An older xgrammar lacks a function, or a structural tag has other fields. vLLM knows what
        # to do.
        pass
    signal.setitimer(signal.ITIMER_PROF, 0)
    return refusal


def _sentence(error: Exception) -> str:
    text = _PLACE.sub("", " ".join(str(error).split()))
    return text[:LONGEST] or type(error).__name__


def _arguments(xgrammar: Any, kind: str, text: str) -> tuple[Any, ...]:
    # An older form of a structural tag has the fields `structures` and `triggers`. vLLM passes them
    # to xgrammar as objects.
    document = json.loads(text) if kind == "structural_tag" else {}
    if "structures" not in document:
        return (text,)
    items = [
        xgrammar.StructuralTagItem(
            begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"]
        )
        for item in document["structures"]
    ]
    return items, document["triggers"]


def _answer(xgrammar: Any, tokenizer: Any, compiled: Any) -> None:
    """Walk through an answer of a few tokens; each is the first token that the grammar allows.

    Raises:
        DeadEndError: the grammar allows no token. vLLM would then end the request without a reason.
    """
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    stops = tokenizer.stop_token_ids
    for count in range(TOKENS):
        matcher.fill_next_token_bitmask(mask, 0)
        words = mask[0].tolist()
        # Without stop tokens, a complete answer allows no token either.
        if stops and not any(words):
            raise DeadEndError(
                f"allows no token after {count} tokens of an answer: a rule may lead only to itself"
            )
        token = next((token for token in _allowed(words) if token not in stops), None)
        if token is None or not matcher.accept_token(token):
            return


def _allowed(words: Sequence[int]) -> Iterator[int]:
    """Yield the tokens that a mask allows. It has a bit for each token, in words of 32 bits."""
    for place, word in enumerate(words):
        # Most words are empty, so this saves time.
        if word:
            for bit in range(32):
                if word >> bit & 1:
                    yield 32 * place + bit


def _receive(control: socket.socket) -> socket.socket | None:
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _read(connection: socket.socket) -> str:
    with connection.makefile("rb") as stream:
        return stream.read().decode()


if __name__ == "__main__":
    serve(socket.socket(fileno=0))
