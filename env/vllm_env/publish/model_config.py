"""Edit the official backend's ``config.pbtxt`` for this project's model; keep everything else.

The text itself is edited, so comments and order stay. protobuf parses it before and after each
edit. An edit that changes anything but the intended field is discarded.
"""

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_env.base.errors import VllmEnvError
from vllm_env.model.files import ENVIRONMENT, MODEL_DIRECTORY, parse_config

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
# The string_value of the environment's parameter.
_PLACE = (
    rf"""["']{ENVIRONMENT}["'](?:(?!string_value)[\s\S])*"""
    rf"string_value{_GAP}:{_GAP}{_STRING}"
)
_ADDED = """\

# Added by gen_vllm_env.sh adopt; the model declares its tensors itself.
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
    wanted = parse_config(file, text)
    _refuse(file, wanted)
    # 1) The fields that name the backend.
    for field, value in _FIELDS.items():
        # Triton fills in an empty field.
        if getattr(wanted, field) not in ("", value):
            setattr(wanted, field, value)
            pattern = rf"\b{field}{_GAP}:{_GAP}{_STRING}"
            text = _edited(file, text, pattern=pattern, value=value, wanted=wanted)
    # 2) The parameter that names the environment.
    place = f"{MODEL_DIRECTORY}/{environment}"
    if ENVIRONMENT not in wanted.parameters:
        added = _ADDED.format(name=ENVIRONMENT, place=place)
        return f"{text.rstrip()}\n{added}"
    parameter = wanted.parameters[ENVIRONMENT]
    if parameter.string_value == place:
        return text
    parameter.string_value = place
    return _edited(file, text, pattern=_PLACE, value=place, wanted=wanted)


def _refuse(file: Path, config: "ModelConfig") -> None:
    # Adopting would not help: the model would still not load.
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


def _edited(file: Path, text: str, pattern: str, value: str, wanted: "ModelConfig") -> str:
    """Return the text after one edit, which must parse as ``wanted``.

    Args:
        file: the configuration's path, for messages.
        text: the configuration before the edit.
        pattern: matches the field; its first group is the string to replace.
        value: the new string.
        wanted: the configuration after the edit.
    """
    for match in re.finditer(pattern, text):
        new = f'{text[: match.start(1)]}"{value}"{text[match.end(1) :]}'
        # A match may be in a comment or in another string. Then the text no longer parses, or
        # it parses as another configuration.
        with contextlib.suppress(VllmEnvError):
            if parse_config(file, new) == wanted:
                return new
    raise VllmEnvError(
        f"{file} cannot be edited: no string in it could be replaced to make it name {value!r}.",
        remedy="Write that field once, on a line of its own, as Triton's documentation has it.",
    )
