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

    It looks like this, and key and value may come in any order:
    ``parameters { key: "EXECUTION_ENV_PATH" value { string_value: "PATH" } }``

    Args:
        config: the file's text. Only its messages and their string fields are read.
    """
    found = ""
    field = ""
    follows_string = False
    # The string fields of the messages whose bracket is still open, the innermost last. The first
    # is the file itself.
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
            # 1) If this was the value of a parameter, the message around it is the parameter. Any
            # other message gets a "value" that nobody reads.
            messages[-1]["value"] = closed.get("string_value", "")
            # 2) If this was the parameter, its value is known by now. The last of several counts.
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
        number = int(octal, 8) if octal else int(hexadecimal, 16)
        # Of an octal number above 255, the lowest eight bits count.
        return bytes([number & 0xFF])

    # As bytes: several escapes may give the bytes of one character.
    content = string[1:-1].encode()
    return _ESCAPE.sub(replaced, content).decode("utf-8", "replace")
