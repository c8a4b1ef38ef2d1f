"""Edit the official backend's ``config.pbtxt`` for this project's model; keep everything else in it.

The text itself is edited, so comments and order stay. protobuf parses it before and after each edit. An edit that changes
anything but the intended field is discarded.
"""

import contextlib
import re
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from vllm_env.base.errors import VllmEnvError
from vllm_env.model.files import ENVIRONMENT, MODEL_DIRECTORY, parse_config

_GAP = r"(?:\s|#[^\n]*\n)*"  # may stand between the parts of a field: white space and comments
_STRING = r"""("[^"\n]*"|'[^'\n]*')"""
# Triton fills in the last two fields from the backend, and users copy them from what Triton then shows.
_FIELDS = {
    "backend": "python",
    "runtime": "libtriton_python.so",
    "default_model_filename": "model.py",
}
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
        VllmEnvError: the model cannot be served with it (the official backend refuses it, too), or no edit gives the
            intended result.
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
        wrong, remedy = (
            f"max_batch_size: {config.max_batch_size}",
            "Write max_batch_size: 0, or leave it out.",
        )
    elif (
        config.HasField("model_transaction_policy")
        and not config.model_transaction_policy.decoupled
    ):
        wrong, remedy = (
            "a model_transaction_policy that is not decoupled",
            "Write decoupled: true in it, or leave it out.",
        )
    if wrong:
        cause = "vLLM batches by itself and answers in parts; the official backend refuses this as well."
        raise VllmEnvError(f"{file} has {wrong}.", cause=cause, remedy=remedy)


def _edited(file: Path, text: str, pattern: str, value: str, wanted: ModelConfig) -> str:
    """Return the text after one edit: the first match of ``pattern`` whose replacement parses as ``wanted``."""
    for found in re.finditer(pattern, text):
        new = f'{text[: found.start(1)]}"{value}"{text[found.end(1) :]}'
        with contextlib.suppress(VllmEnvError):  # the match was inside another string
            if parse_config(file, new) == wanted:
                return new
    raise VllmEnvError(
        f"{file} cannot be edited: no string in it could be found whose change makes it name {value!r}.",
        remedy="Write that field once, on a line of its own, as Triton's documentation has it.",
    )
