"""`vllm_openai_args.json`: whose argument is whose."""

from __future__ import annotations

import json

import pytest

from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError
from triton_vllm.chat.template import ChatTemplate
from triton_vllm.openai import arguments, start
from triton_vllm.vllm_api import ParserNames

DECLARED = {"chat_template": str | None, "enable_log_outputs": bool, "ssl_keyfile": str | None, "host": str | None}
ENGINE = {"max_model_len": 100}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads a file with this content."""
    monkeypatch.setattr(vllm_api, "server_arg_types", lambda vllm: DECLARED)

    def read(content, parsers=None, template=None, file="vllm_engine_args.json"):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / arguments.FILE_NAME).write_text(text)
        common = start.CommonArguments(ENGINE, parsers or ParserNames(), template or ChatTemplate(), file)
        return arguments.read(tmp_path, None, common.values(), common.file)

    return read


def test_arguments_are_converted(read):
    """As engine arguments are; null is vLLM's default, and the log is quiet unless the operator wants it."""
    given = {"enable_log_outputs": "true", "ssl_keyfile": None}
    assert read(given) == {**arguments.DEFAULTS, "enable_log_outputs": True}


def test_the_file_may_be_missing(read):
    """Then vLLM's defaults hold."""
    assert read(None) == arguments.DEFAULTS


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "cannot be read as JSON"),
        ([1], "must hold a JSON object, not list"),
        ({"enable_log_output": True}, "no argument 'enable_log_output'.*did you mean 'enable_log_outputs'"),
        ({"enable_log_outputs": "maybe"}, "enable_log_outputs must be true or false"),
        ({"max_model_len": 200}, "max_model_len differs from vllm_engine_args.json"),
        ({"tool_call_parser": "hermes"}, "tool_call_parser differs from vllm_engine_args.json.*set tool_parser there"),
        *(({name: "x"}, f"{name} cannot be set here: ") for name in arguments.OURS),
    ],
    ids=str,
)
def test_other_files_are_refused(read, content, text):
    """The message names the argument and what to do."""
    with pytest.raises(ConfigError, match=text):
        read(content)


def test_the_same_argument_may_be_in_both_files(read):
    """With the same value."""
    same = {"max_model_len": 100, "tool_call_parser": "hermes", "chat_template": "a.jinja"}
    assert read(same, ParserNames(tool="hermes"), ChatTemplate("a.jinja", "{{ x }}")) == arguments.DEFAULTS


@pytest.mark.parametrize("chosen", [ChatTemplate(), ChatTemplate("b.jinja", "{{ x }}")])
def test_another_chat_template_for_this_api_is_refused(read, chosen):
    """The two APIs would render the same messages in two ways, also if the other one has the model's own template."""
    with pytest.raises(ConfigError, match=r"chat_template differs from vllm_engine_args\.json.*set it there"):
        read({"chat_template": "a.jinja"}, template=chosen)


@pytest.mark.parametrize("content", [{"max_model_len": 200}, {"enable_auto_tool_choice": True}, {"model_tag": "m"}], ids=str)
def test_the_file_of_an_adopted_model_is_named(read, content):
    """It has no `vllm_engine_args.json`."""
    with pytest.raises(ConfigError, match=r"1/model\.json") as raised:
        read(content, file="1/model.json")
    assert "vllm_engine_args" not in str(raised.value)
