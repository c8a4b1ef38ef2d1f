"""The arguments of vLLM's server: those that count for both APIs are in them."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from triton_vllm.vllm_api import ParserNames, openai


@dataclass
class EngineArgs:
    """In place of AsyncEngineArgs."""

    model: str = "m"
    max_model_len: int = 0


@pytest.fixture
def made(monkeypatch):
    """Returns what the server is started with."""
    checked: list[Any] = []

    def parser(argparse: ArgumentParser) -> ArgumentParser:
        argparse.add_argument("--chat_template")
        argparse.add_argument("--tool_call_parser")
        argparse.add_argument("--max_model_len")
        return argparse

    parts = {
        "make_arg_parser": parser,
        "FlexibleArgumentParser": ArgumentParser,
        "validate_parsed_serve_args": lambda args: checked.append(vars(args).copy()),
    }
    monkeypatch.setattr(openai, "_find", parts.__getitem__)

    def made(**shared):
        vllm: Any = SimpleNamespace(AsyncEngineArgs=EngineArgs)
        openai.server_args(vllm, {"max_model_len": 9}, {"own": 1}, **shared)
        return checked[-1]

    return made


def test_both_apis_have_the_same_arguments(made):
    """The engine's, the chat template, and the parser, which also turns on the choice of tools."""
    assert made(parsers=ParserNames(tool="hermes"), chat_template="{{ x }}") == {
        "model": "m",
        "max_model_len": 9,
        "own": 1,
        "chat_template": "{{ x }}",
        "tool_call_parser": "hermes",
        "enable_auto_tool_choice": True,
    }


def test_without_them_vllms_defaults_hold(made):
    """The model's own template, and no parser."""
    args = made(parsers=ParserNames(), chat_template=None)
    assert (args["chat_template"], args["tool_call_parser"], args["enable_auto_tool_choice"]) == (None, None, False)
