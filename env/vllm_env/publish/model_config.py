"""Edit the official backend's ``config.pbtxt`` for this project's model; keep everything else.

The text itself is edited, so comments and order stay. protobuf parses it before and after each
edit. An edit that changes anything but the intended field is discarded. The count of instances is
edited in this project's own configuration, too.
"""

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import write_whole
from vllm_env.model.files import (
    CONFIG_NAME,
    ENVIRONMENT_PARAMETER,
    MODEL_DIRECTORY,
    encode_config,
    parse_config,
    read_config_text,
)

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

# White space and comments may stand between the parts of a field.
_GAP = r"(?:\s|#[^\n]*\n)*"
_STRING = r"""("[^"\n]*"|'[^'\n]*')"""
# Triton fills in the last two fields from the backend, and users copy them from what Triton shows.
_FIELDS = {
    "backend": "python",
    "runtime": "libtriton_python.so",
    "default_model_filename": "model.py",
}
SEVERAL_SINCE_VLLM = Version("0.28")
"""From this vLLM on, several front ends can share an engine."""
# The string_value of the environment's parameter.
_PLACE = (
    rf"""["']{ENVIRONMENT_PARAMETER}["'](?:(?!string_value)[\s\S])*"""
    rf"string_value{_GAP}:{_GAP}{_STRING}"
)
_ADDED = """\

# Added by vllm-env's adopt; the model declares its tensors itself.
parameters {{
  key: "{name}"
  value: {{ string_value: "{place}" }}
}}
"""


def rewrite_config(file: Path, text: str, environment: str) -> str:
    """Return the configuration with the Python backend and the named environment.

    Args:
        file: the configuration's path, for messages.
        text: the configuration.
        environment: the name of the environment in the model's folder.

    Raises:
        VllmEnvError: the model cannot be served with it (the official backend refuses it, too),
            or no edit gives the intended result.
    """
    # The configuration as it must become; each edit of the text follows a change of it.
    wanted = parse_config(file, text)
    _refuse_unservable(file, wanted)
    # 1) The fields that name the backend.
    for field, value in _FIELDS.items():
        # Triton fills in an empty field.
        if getattr(wanted, field) not in ("", value):
            setattr(wanted, field, value)
            pattern = rf"\b{field}{_GAP}:{_GAP}{_STRING}"
            text = _edited(
                file, text, pattern=pattern, value=f'"{value}"', wanted=wanted, field=field
            )
    # 2) The parameter that names the environment.
    path = f"{MODEL_DIRECTORY}/{environment}"
    if ENVIRONMENT_PARAMETER not in wanted.parameters:
        added = _ADDED.format(name=ENVIRONMENT_PARAMETER, place=path)
        return f"{text.rstrip()}\n{added}"
    parameter = wanted.parameters[ENVIRONMENT_PARAMETER]
    if parameter.string_value == path:
        return text
    parameter.string_value = path
    return _edited(
        file, text, pattern=_PLACE, value=f'"{path}"', wanted=wanted, field="string_value"
    )


def with_count(file: Path, text: str, count: int) -> str:
    """Return the configuration with ``count`` instances in its instance group.

    Args:
        file: the configuration's path, for messages.
        text: the configuration.
        count: the number of instances.

    Raises:
        VllmEnvError: it does not have exactly one group, or no edit gives the intended result.
    """
    wanted = parse_config(file, text)
    groups = wanted.instance_group
    if len(groups) != 1:
        raise VllmEnvError(
            f"{file} has {len(groups)} instance groups.",
            cause="--count sets the count of one. Each further group has an engine of its own.",
            remedy="Omit --count and edit the file, or write one group, with count: 1.",
        )
    if groups[0].count == count:
        return text
    groups[0].count = count
    pattern = rf"\bcount{_GAP}:{_GAP}(\d+)"
    return _edited(file, text, pattern=pattern, value=str(count), wanted=wanted, field="count")


def has_configuration_of(template: Path, model: Path) -> bool:
    """Return whether a model has the template's configuration, with one instance.

    A model without a configuration will get the template's, so it counts as one that has it.
    """
    config = template / CONFIG_NAME
    text = read_config_text(config)
    own = model / CONFIG_NAME
    if own.exists() and read_config_text(own) != text:
        return False
    # The template has one group of one instance. A user who works in the template's own folder may
    # have edited it.
    return [group.count for group in parse_config(config, text).instance_group] == [1]


def default_count(profile: str, vllm: str) -> int:
    """Return the number of instances of a new model.

    Args:
        profile: the profile of the environment.
        vllm: the version of vLLM in it.
    """
    # On a GPU one front end is the bottleneck: at 256 streams its longest gaps were 75 ms, and
    # those of two 43 ms (H200, vLLM 0.33.0). On few cores a second one only takes memory.
    return 2 if profile == "cuda" and Version(vllm) >= SEVERAL_SINCE_VLLM else 1


def set_count(model: Path, count: int, current: Path | None = None) -> None:
    """Set the count of the instance group; write nothing for 0, or if it is already set to it.

    Args:
        model: the model's folder.
        count: the number of instances.
        current: the folder that ``model`` will replace.

    Raises:
        VllmEnvError: the configuration cannot be edited.
    """
    if not count:
        return
    config = model / CONFIG_NAME
    # As in `set_environment_path`: a relative link leads nowhere from the staging folder.
    readable = config if config.exists() or not current else current / CONFIG_NAME
    text = read_config_text(readable)
    new = with_count(config, text, count)
    if new != text:
        write_whole(config, encode_config(new))


def changes_count(model: Path, count: int) -> bool:
    """Return whether ``set_count`` would write; False for a folder without a configuration.

    Raises:
        VllmEnvError: the configuration cannot be edited.
    """
    config = model / CONFIG_NAME
    if not count or not config.is_file():
        return False
    text = read_config_text(config)
    return with_count(config, text, count) != text


def _refuse_unservable(file: Path, config: "ModelConfig") -> None:
    """Raise a VllmEnvError if neither this project's model nor the official backend can serve it.

    Adopting would not help: the model would still not load.
    """
    has_policy = config.HasField("model_transaction_policy")
    if config.max_batch_size > 0:
        wrong = f"max_batch_size: {config.max_batch_size}"
        remedy = "Write max_batch_size: 0, or leave it out."
    elif has_policy and not config.model_transaction_policy.decoupled:
        wrong = "a model_transaction_policy that is not decoupled"
        remedy = "Write decoupled: true in it, or leave it out."
    else:
        return
    raise VllmEnvError(
        f"{file} has {wrong}.",
        cause="vLLM batches by itself and answers in parts. The official backend refuses it, too.",
        remedy=remedy,
    )


def _edited(
    file: Path, text: str, *, pattern: str, value: str, wanted: "ModelConfig", field: str
) -> str:
    """Return the text after one edit, which must parse as ``wanted``.

    Args:
        file: the configuration's path, for messages.
        text: the configuration before the edit.
        pattern: matches the field; its first group is the value to replace.
        value: the new value, as the text has it.
        wanted: the configuration after the edit.
        field: the field's name, for messages.

    Raises:
        VllmEnvError: no edit at a match of the pattern gives the configuration.
    """
    for match in re.finditer(pattern, text):
        new = f"{text[: match.start(1)]}{value}{text[match.end(1) :]}"
        # A match may be in a comment or in another string. Then the text no longer parses, or
        # it parses as another configuration.
        with contextlib.suppress(VllmEnvError):
            if parse_config(file, new) == wanted:
                return new
    raise VllmEnvError(
        f"{file} cannot be edited: no {field} in it could be replaced by {value}.",
        remedy=f"Write `{field}: {value}` there yourself, on a line of its own.",
    )
