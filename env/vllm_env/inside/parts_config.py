"""Reads the one parameter of a config.pbtxt that the unpacker needs, without protobuf."""

import re

_TOKEN = re.compile(
    r"""\#[^\n]*"""  # a comment
    r"""|(?P<string>(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'))"""
    r"""|(?P<word>\w+)|(?P<bracket>[{}<>])"""
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def environment_of(config: str) -> str:
    """Return the parameter EXECUTION_ENV_PATH of a config.pbtxt; "" if it has none.

    Args:
        config: the file's text. Only its messages and their string fields are read.
    """
    found = ""
    field = ""
    follows_string = False
    # The string fields of the messages that are open, the innermost last.
    messages: list[dict[str, str]] = [{}]
    for token in _TOKEN.finditer(config):
        if token["word"]:
            field = token["word"]
        elif token["string"]:
            # Two strings in a row are parts of one.
            begun = messages[-1].get(field, "") if follows_string else ""
            messages[-1][field] = begun + _unquoted(token["string"])
        elif token["bracket"] in ("{", "<"):
            messages.append({})
        elif token["bracket"] and len(messages) > 1:
            closed = messages.pop()
            # A parameter is a message with a key and a value, in any order.
            messages[-1]["value"] = closed.get("string_value", "")
            # If a key is repeated, the last one counts.
            if closed.get("key") == "EXECUTION_ENV_PATH":
                found = closed.get("value", "")
        # A comment may be between the parts of a string.
        if token.lastgroup:
            follows_string = token.lastgroup == "string"
    return found


def _unquoted(string: str) -> str:
    """Return the content of a string with its escapes replaced."""

    def replaced(match: "re.Match[bytes]") -> bytes:
        octal, hexadecimal, other = match.groups()
        if other is not None:
            return _ESCAPED.get(other, other)
        return bytes([(int(octal, 8) if octal else int(hexadecimal, 16)) & 0xFF])

    # An escape may be one byte of a character of several.
    return _ESCAPE.sub(replaced, string[1:-1].encode()).decode("utf-8", "replace")
