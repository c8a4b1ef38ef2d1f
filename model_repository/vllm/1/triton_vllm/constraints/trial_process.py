"""A separate process that compiles constraints of requests once, to see what that costs.

The environment's interpreter runs this file as a script. Its standard input is a Unix socket that
delivers connections. It reads the tokenizer from the first connection. Each further connection is a
constraint, for which it forks.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import re
import resource
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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
BEGINNING_TOKENS = 16
"""How many tokens of an answer the vocabulary must be able to write."""
# If a grammar can be read in many ways, each token takes long and delays all other requests. Often
# that begins after a hundred tokens: xgrammar follows all ways to read the answer so far.
TIMED_TOKENS = 256
"""How many tokens of an answer are timed."""
TIMED_TOKENS_S = 5.0
"""After how many processor seconds no more tokens are timed."""
# With 128,000 tokens in the vocabulary, usual schemas take 2 to 100 ms, and a grammar of SQL 300. A
# busy machine may double that.
BEGINNING_MOST_S = 1.0
"""The most processor seconds for ``BEGINNING_TOKENS`` tokens."""
GROWN_MOST_S = 0.4
"""The most processor seconds for them if some earlier ones took less than a quarter of it."""
DONE_PREFIX = b"done"
"""The first bytes of each answer. Why a constraint cannot be used follows them, if it cannot."""
# Some errors begin with a time and a place in xgrammar's sources.
_PLACE = re.compile(r"^(?:\[[\d:]+\] )?(?:\S+\.(?:cc|h):\d+: )?")
LONGEST_REFUSAL = 400
"""Characters of a refusal."""


class UnusableError(Exception):
    """Why no answer can be given under a grammar."""


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
                connection.sendall(DONE_PREFIX)
            elif os.fork() == 0:
                # If this process exceeds its limits, it ends without an answer, and nothing else
                # ends with it.
                try:
                    refusal = _attempt(xgrammar, tokenizer, json.loads(_read(connection)))
                    connection.sendall(DONE_PREFIX + refusal.encode(errors="replace"))
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
    # 3) Do what vLLM would do with the constraint. Each step has its own time.
    read, compile_ = COMPILERS[task["kind"]]
    refusal = ""
    try:
        arguments = _arguments(xgrammar, task["kind"], task["text"])
        getattr(xgrammar.Grammar, read)(*arguments)
        signal.setitimer(signal.ITIMER_PROF, task["compile_s"])
        compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=2)
        compiled = getattr(compiler, compile_)(*arguments)
        signal.setitimer(signal.ITIMER_PROF, 2 * TIMED_TOKENS_S)
        _require_answer(xgrammar, tokenizer, compiled)
        _require_speed(xgrammar, tokenizer, compiled)
    # The classes of xgrammar's own errors.
    except (RuntimeError, ValueError) as error:
        # C++ has no memory left.
        if "bad_alloc" in str(error):
            raise MemoryError from None
        refusal = f"is refused by xgrammar: {_sentence(error)}"
    except UnusableError as error:
        refusal = str(error)
    except MemoryError:
        # This process then ends without an answer, as after any other exceeded limit.
        raise
    except Exception:  # noqa: BLE001, S110
        # An older xgrammar lacks a function, or a structural tag has other fields. vLLM knows what
        # to do.
        pass
    # No limit for sending the result.
    signal.setitimer(signal.ITIMER_PROF, 0)
    return refusal


def _sentence(error: Exception) -> str:
    text = _PLACE.sub("", " ".join(str(error).split()))
    return text[:LONGEST_REFUSAL] or type(error).__name__


def _arguments(xgrammar: Any, kind: str, text: str) -> tuple[Any, ...]:
    """Return what xgrammar's functions take for a constraint: nearly always its text."""
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


def _require_answer(xgrammar: Any, tokenizer: Any, compiled: Any) -> None:
    """Begin an answer; each token is the first one that the grammar allows.

    Raises:
        UnusableError: the grammar allows no token. vLLM would then end the request without a
            reason.
    """
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    for count in range(BEGINNING_TOKENS):
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = _allowed(tokenizer, mask, stop=True)
        # For a tokenizer without stop tokens, a complete answer allows no token either.
        if tokenizer.stop_token_ids and not allowed.size:
            raise UnusableError(
                f"allows no token after {count} tokens of an answer: a rule may lead only to itself"
            )
        others = _allowed(tokenizer, mask, stop=False)
        # The answer is complete, or xgrammar does not go on.
        if not others.size or not matcher.accept_token(int(others[0])):
            return


def _require_speed(xgrammar: Any, tokenizer: Any, compiled: Any) -> None:
    """Write an answer of tokens that are drawn by lot from those that the grammar allows.

    Raises:
        UnusableError: the tokens take too long.
    """
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    lot = random.Random(0)  # noqa: S311 - nobody gains by knowing it
    end = time.process_time() + TIMED_TOKENS_S
    # Processor seconds in xgrammar: for the present BEGINNING_TOKENS tokens, and the least for as
    # many earlier ones. There are no earlier ones yet.
    spent = 0.0
    least = math.inf
    for count in range(1, TIMED_TOKENS + 1):
        begin = time.process_time()
        if begin > end:
            return
        matcher.fill_next_token_bitmask(mask, 0)
        spent += time.process_time() - begin
        # No stop tokens: a short answer would not show whether the tokens become slow.
        allowed = _allowed(tokenizer, mask, stop=False)
        if not allowed.size:
            return
        token = int(allowed[lot.randrange(allowed.size)])
        begin = time.process_time()
        matcher.accept_token(token)
        spent += time.process_time() - begin
        is_slow = spent > BEGINNING_MOST_S
        has_grown = spent > max(GROWN_MOST_S, 4 * least)
        if is_slow or has_grown:
            raise UnusableError(
                f"takes too long for each token, after {count} tokens of an answer: "
                "it may be read in too many ways"
            )
        if count % BEGINNING_TOKENS == 0:
            least = min(least, spent)
            spent = 0.0


def _allowed(tokenizer: Any, mask: Any, *, stop: bool) -> Any:
    """Return the tokens that a mask allows, as a NumPy array.

    Args:
        tokenizer: xgrammar's description of the tokenizer.
        mask: has a bit for each token, in words of 32 bits. The bits of the last word that are no
            tokens may be set.
        stop: whether the tokens that end an answer count.
    """
    numpy = importlib.import_module("numpy")
    bits = numpy.unpackbits(mask[0].numpy().view(numpy.uint8), bitorder="little")
    bits[tokenizer.vocab_size :] = 0
    if not stop:
        bits[list(tokenizer.stop_token_ids)] = 0
    return numpy.flatnonzero(bits)


def _receive(control: socket.socket) -> socket.socket | None:
    """Return the next connection; None if the other end of the socket is closed."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _read(connection: socket.socket) -> str:
    with connection.makefile("rb") as stream:
        return stream.read().decode()


if __name__ == "__main__":
    serve(socket.socket(fileno=0))
