"""Take the chat template that the operator has chosen from the engine arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# An option of vLLM's server, and not an argument of its engine. Both APIs render chats.
ARGUMENT_NAME = "chat_template"
# vLLM's server tells templates from names of files by these.
_JINJA = frozenset("{}\n")


@dataclass(frozen=True)
class ChatTemplate:
    """The operator's chat template.

    Attributes:
        value: the argument as the operator wrote it. None if the model's own template counts.
        text: the template. None if the model's own counts.
    """

    value: str | None = None
    text: str | None = None


def split(
    given: Mapping[str, Any], model_dir: Path, file: str
) -> tuple[Mapping[str, Any], ChatTemplate]:
    """Return the engine arguments without the chat template, and the template.

    Args:
        given: the engine arguments as the operator wrote them.
        model_dir: the folder with ``config.pbtxt``. Names of files are relative to it.
        file: the file with the arguments.

    Raises:
        ConfigError: the argument is not a template or the name of a file with one.
    """
    others = {name: value for name, value in given.items() if name != ARGUMENT_NAME}
    value = given.get(ARGUMENT_NAME)
    if value in (None, ""):
        return others, ChatTemplate()
    if not isinstance(value, str):
        raise ConfigError(
            f"{file}: {ARGUMENT_NAME} must be a template, or the name of a file with one"
        )
    text = value if _is_template(value, model_dir) else _read(model_dir / value, file)
    return others, ChatTemplate(value, text)


def _is_template(value: str, model_dir: Path) -> bool:
    """Return whether the argument is a template itself, and not the name of a file with one."""
    if "\n" in value:
        return True
    if not _JINJA & set(value):
        return False
    # A path may have a brace.
    try:
        return not (model_dir / value).is_file()
    # It is too long for a path.
    except OSError:
        return True


def _read(path: Path, file: str) -> str:
    """Return the template in a file; ``file`` is the name of the arguments' file for errors.

    Raises:
        ConfigError: the file cannot be read, or has no template.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: {ARGUMENT_NAME}: the file {path} cannot be read: {error}; "
            "give a path in the model's folder, an absolute path, or the template itself"
        ) from None
    if not _JINJA & set(text):
        raise ConfigError(f"{file}: {ARGUMENT_NAME}: the file {path} has no template")
    return text
