"""A separate process that compiles constraints of requests once, to see what that costs.

The environment's interpreter runs this file as a script. Its standard input is a Unix socket that
delivers connections. It reads the tokenizer from the first connection. Each further connection is a
constraint, for which it forks. A fork that exceeds its processor time or memory ends without an
answer, and nothing else ends with it.
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
"""xgrammar's functions to read a constraint, as vLLM does in the event loop, and to compile it, as EngineCore does."""


TOKENS = 16
"""How many tokens of an answer are tried as well. If a grammar can be read in many ways, each token
takes long and delays all other requests."""
DONE = b"done"


def serve(control: socket.socket) -> None:
    """Take connections until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then removes forks that have ended
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
    """Compile a constraint; the kernel ends the process if that takes too long.

    Raises:
        MemoryError: compiling takes too much memory.
    """
    used = (
        int(re.findall(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text("utf-8"))[0]) << 10
    )
    # The limit is for the whole process, so its present size is added.
    resource.setrlimit(resource.RLIMIT_DATA, (used + task["bytes"],) * 2)
    read, compile_ = COMPILERS[task["kind"]]
    # The signal's default action ends the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, task["read_s"])  # counts the processor time of all threads
    try:
        what = _arguments(xgrammar, task["kind"], task["text"])
        getattr(xgrammar.Grammar, read)(*what)
        signal.setitimer(signal.ITIMER_PROF, task["compile_s"])
        compiled = getattr(xgrammar.GrammarCompiler(tokenizer, max_threads=2), compile_)(*what)
        _answer(xgrammar, tokenizer, compiled)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001, S110 - malformed, or not for xgrammar: vLLM reports it, or uses another compiler
        pass
    signal.setitimer(signal.ITIMER_PROF, 0)


def _arguments(xgrammar: Any, kind: str, text: str) -> tuple[Any, ...]:
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
    """Walk through an answer of a few tokens; each is the first token that the grammar allows."""
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
