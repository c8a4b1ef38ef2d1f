"""What the model of these tests says: vLLM's real engine and parsers work on it, and its weights know these few answers.

Its chat template shortens a conversation to what is to be done next: which client asks, by the tools that it offers, and how
many results of tools it has sent. So a tiny model can follow prompts of 10,000 tokens.
"""

from __future__ import annotations

import json
from typing import Any

POSITIONS = 65_536
"""Claude Code asks for 32,000 tokens."""
TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
GREETING, SHOUTED = "greeting.txt", "shouted.txt"
TEXT = "hello from the stand-in\n"
SHOUT = f"tr a-z A-Z < {GREETING} | tee {SHOUTED}"
DONE = "The file is written, and the command has run."
QUESTION = "What is the weather in Paris?"
ASKED_FOR_JSON = "What is your mood?"
PROMPT = "The capital of France is"
TEMPLATE = (
    "{% set seen = namespace(results=0, asked='') %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{% set seen.results = seen.results + 1 %}"
    "{% elif message['role'] == 'user' %}{% set seen.asked = message['content'] | string %}{% endif %}"
    "{% endfor %}"
    "{% set names = (tools or []) | map(attribute='function') | map(attribute='name') | list %}"
    "{% set who = 'claude' if 'Write' in names else 'codex' if 'exec_command' in names "
    "else 'weather' if names and 'weather' in seen.asked else 'mood' if 'mood' in seen.asked else 'hello' %}"
    "[{{ who }} {{ seen.results }}]{{ '\\n' }}"
)


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _after_thought(answer: str) -> str:
    return f"<think>\nSo be it.\n</think>\n\n{answer}"


FACTS = (
    ("[claude 0]\n", _after_thought("I write the file.\n" + _call("Write", file_path=GREETING, content=TEXT))),
    ("[claude 1]\n", _after_thought(_call("Bash", command=SHOUT))),
    ("[claude 2]\n", _after_thought(DONE)),
    ("[codex 0]\n", _after_thought("I write the file.\n" + _call("exec_command", cmd=f"echo {TEXT.strip()} > {GREETING}"))),
    ("[codex 1]\n", _after_thought(_call("exec_command", cmd=SHOUT))),
    ("[codex 2]\n", _after_thought(DONE)),
    ("[weather 0]\n", _after_thought(_call("get_weather", city="Paris"))),
    ("[weather 1]\n", _after_thought("It is sunny in Paris.")),
    ("[hello 0]\n", _after_thought("Hello, how can I help?")),
    ("[mood 0]\n", _after_thought(json.dumps({"mood": "good"}))),
    (PROMPT, " Paris."),
)
"""What the template writes, and the answers."""
REQUEST = {
    "template": TEMPLATE,
    "tokens": TOKENS,
    "defaults": {"do_sample": True, "temperature": 0.7, "top_k": 1},
    "facts": FACTS,
    "positions": POSITIONS,
}
"""For `support.models.chatting`."""
