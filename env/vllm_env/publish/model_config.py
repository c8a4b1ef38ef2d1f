"""Turns the official backend's ``config.pbtxt`` into one for this project's model; what else stands there stays.

The text is edited, so that comments and order stay, and protobuf reads it before and after: an edit that changed anything but
what was meant is not made.
"""

import contextlib
import re
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from vllm_env.base.errors import VllmEnvError
from vllm_env.model.files import ENVIRONMENT, MODEL_DIRECTORY, parse_config

_GAP = r"(?:\s|#[^\n]*\n)*"  # what may stand between the parts of a field, comments too
_STRING = r"""("[^"\n]*"|'[^'\n]*')"""
# Triton completes the last two by the backend, and people write down what it then shows.
_FIELDS = {"backend": "python", "runtime": "libtriton_python.so", "default_model_filename": "model.py"}
_ADDED = """\

# Added by gen_vllm_env.sh adopt; the model declares its tensors itself.
parameters {{
  key: "{name}"
  value: {{ string_value: "{place}" }}
}}
"""


def rewrite_config(file: Path, text: str, environment: str) -> str:
    """Return the configuration with the Python backend and the environment of this name.

    Args:
        file: where it stands, for messages.
        text: the configuration.
        environment: the name of the environment in the model's folder.

    Raises:
        VllmEnvError: it cannot be served so (the official backend refuses it as well), or no edit does what is meant.
    """
    wanted, place = parse_config(file, text), f"{MODEL_DIRECTORY}/{environment}"
    _refuse(file, wanted)
    for field, value in _FIELDS.items():
        if getattr(wanted, field) not in ("", value):
            setattr(wanted, field, value)
            text = _edited(file, text, rf"\b{field}{_GAP}:{_GAP}{_STRING}", value, wanted)
    if ENVIRONMENT not in wanted.parameters:
        text = f"{text.rstrip()}\n{_ADDED.format(name=ENVIRONMENT, place=place)}"
    elif wanted.parameters[ENVIRONMENT].string_value != place:
        wanted.parameters[ENVIRONMENT].string_value = place
        pattern = rf"""["']{ENVIRONMENT}["'](?:(?!string_value)[\s\S])*string_value{_GAP}:{_GAP}{_STRING}"""
        text = _edited(file, text, pattern, place, wanted)
    return text


def _refuse(file: Path, config: ModelConfig) -> None:
    wrong = ""
    if config.max_batch_size > 0:
        wrong, remedy = f"max_batch_size: {config.max_batch_size}", "Write max_batch_size: 0, or leave it out."
    elif config.HasField("model_transaction_policy") and not config.model_transaction_policy.decoupled:
        wrong, remedy = "a model_transaction_policy that is not decoupled", "Write decoupled: true in it, or leave it out."
    if wrong:
        cause = "vLLM batches by itself and answers in parts; the official backend refuses this as well."
        raise VllmEnvError(f"{file} has {wrong}.", cause=cause, remedy=remedy)


def _edited(file: Path, text: str, pattern: str, value: str, wanted: ModelConfig) -> str:
    """Return the text with the string that ``pattern`` finds replaced, the first by which it means what is wanted."""
    for found in re.finditer(pattern, text):
        new = f'{text[: found.start(1)]}"{value}"{text[found.end(1) :]}'
        with contextlib.suppress(VllmEnvError):  # it stood within another string
            if parse_config(file, new) == wanted:
                return new
    raise VllmEnvError(
        f"{file} cannot be edited: no string in it could be found whose change makes it name {value!r}.",
        remedy="Write that field once, on a line of its own, as Triton's documentation has it.",
    )
