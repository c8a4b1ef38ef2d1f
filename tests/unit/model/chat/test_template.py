"""`chat_template` in the engine arguments."""

from __future__ import annotations

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.chat.template import ChatTemplate, split

TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("value", [TEXT, "a.jinja", "/a.jinja"])
def test_the_template_is_no_engine_argument(tmp_path, value):
    """It is written there, or in a file."""
    (tmp_path / "a.jinja").write_text(TEXT)
    value = str(tmp_path / "a.jinja") if value.startswith("/") else value
    others, template = split({"model": "m", "chat_template": value}, tmp_path, "f")
    assert others == {"model": "m"}
    assert template == ChatTemplate(value, TEXT)


@pytest.mark.parametrize("value", ["{{ x }}" * 100, "{{ x }}\0", "{{ x }}\n", "a\n", "{missing}.jinja"], ids=str)
def test_what_is_no_file_is_a_template(tmp_path, value):
    """Also what is too long for the name of a file."""
    assert split({"chat_template": value}, tmp_path, "f") == ({}, ChatTemplate(value, value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "f: chat_template must be a template"),
        ("missing.jinja", "f: chat_template: the file .*missing.jinja cannot be read.*give a path"),
        ("a\0", "f: chat_template: the file .* cannot be read"),
        (".", "f: chat_template: the file .* cannot be read"),
        ("binary", "f: chat_template: the file .* cannot be read"),
        ("empty", "f: chat_template: the file .* has no template"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_template_is_refused(tmp_path, value, text):
    """With the file's name."""
    (tmp_path / "binary").write_bytes(b"\xff{{")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match=text):
        split({"chat_template": value}, tmp_path, "f")
