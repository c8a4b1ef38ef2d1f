"""A process of its own in which constraints of requests are compiled once, to see what that costs.

Run as a script by the environment's interpreter. Over its standard input, a Unix socket, it gets connections: from the first it
reads the tokenizer, and every further one is a constraint, for which it forks. What runs out of processor time or memory
there ends without a word, and takes nothing else with it.
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
    from collections.abc import Mapping

COMPILERS: Mapping[str, tuple[str, str]] = {
    "json": ("from_json_schema", "compile_json_schema"),
    "regex": ("from_regex", "compile_regex"),
    "grammar": ("from_ebnf", "compile_grammar"),
    "lark": ("from_lark", "compile_lark"),
    "structural_tag": ("from_structural_tag", "compile_structural_tag"),
}
"""xgrammar's functions that read a constraint, as vLLM does in the event loop, and compile it, as EngineCore does."""


TOKENS = 16
"""Of an answer that are tried as well: of a grammar that can be read in many ways each takes long, and delays everybody's."""
DONE = b"done"


def serve(control: socket.socket) -> None:
    """Take connections until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing behind
    xgrammar = importlib.import_module("xgrammar")
    tokenizer = None
    while (connection := _receive(control)) is not None:
        with connection:
            if tokenizer is None:
                tokenizer = xgrammar.TokenizerInfo.deserialize_json(_read(connection))
                connection.sendall(DONE)
            elif os.fork() == 0:
                try:
                    _attempt(xgrammar, tokenizer, json.loads(_read(connection)))
                    connection.sendall(DONE)
                finally:
                    os._exit(0)


def _attempt(xgrammar: Any, tokenizer: Any, task: Mapping[str, Any]) -> None:
    """Compile a constraint; end the process where that takes too long.

    Raises:
        MemoryError: it takes too much memory.
    """
    used = int(re.findall(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text("utf-8"))[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + task["bytes"],) * 2)
    read, compile_ = COMPILERS[task["kind"]]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, task["read_s"])  # counts all threads
    try:
        what = _arguments(xgrammar, task["kind"], task["text"])
        getattr(xgrammar.Grammar, read)(*what)
        signal.setitimer(signal.ITIMER_PROF, task["compile_s"])
        compiled = getattr(xgrammar.GrammarCompiler(tokenizer, max_threads=2), compile_)(*what)
        _answer(xgrammar, tokenizer, compiled)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001, S110 - malformed, or beyond this compiler: vLLM says so, or has another one
        pass
    signal.setitimer(signal.ITIMER_PROF, 0)


def _arguments(xgrammar: Any, kind: str, text: str) -> tuple[Any, ...]:
    document = json.loads(text) if kind == "structural_tag" else {}
    if "structures" not in document:
        return (text,)
    items = [
        xgrammar.StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"])
        for item in document["structures"]
    ]
    return items, document["triggers"]


def _answer(xgrammar: Any, tokenizer: Any, compiled: Any) -> None:
    """Go the way of an answer of a few tokens, each the first that the grammar allows."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    for _ in range(TOKENS):
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = (
            32 * place + bit
            for place, word in enumerate(mask[0].tolist())
            if word
            for bit in range(32)
            if word >> bit & 1 and 32 * place + bit not in tokenizer.stop_token_ids
        )
        token = next(allowed, None)
        if token is None or not matcher.accept_token(token):
            return


def _receive(control: socket.socket) -> socket.socket | None:
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _read(connection: socket.socket) -> str:
    with connection.makefile("rb") as stream:
        return stream.read().decode()


if __name__ == "__main__":
    serve(socket.socket(fileno=0))
