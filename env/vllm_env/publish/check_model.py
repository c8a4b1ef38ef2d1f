"""Checks what stands around the environment in a model's folder: ``config.pbtxt`` and ``1/model.py``, which are the user's."""

import ast
import re
from pathlib import Path

from vllm_env.base.errors import VllmEnvError

from .manifest import Manifest
from .model_folder import CODE, CONFIG_NAME

_COPY = "Copy it from this checkout's model_repository/vllm."
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
# strings are kept, so that a # in one begins no comment
_COMMENT = re.compile(r"""("[^"\n]*"|'[^'\n]*')|#[^\n]*""")
_BACKEND = re.compile(r"""(?:^|[\s;,}\]])backend\s*:\s*(["'])(.*?)\1""")
_ENVIRONMENT = re.compile(
    r"""\bkey\s*:\s*(["'])EXECUTION_ENV_PATH\1[\s,;]*value\s*:?\s*[{<]\s*string_value\s*:\s*(["'])(.*?)\2"""
)


def check_model(model: Path, manifest: Manifest) -> None:
    """Refuse a model whose configuration does not lead Triton to the manifest's environment, or whose code does not parse.

    Raises:
        VllmEnvError: naming the file and what must stand there.
    """
    config, code = model / CONFIG_NAME, model / CODE / "model.py"
    text = _COMMENT.sub(lambda found: found[1] or "", _read(config))
    backend = _BACKEND.search(text)
    if backend is None or backend[2] != "python":
        stands = f'names the backend "{backend[2]}"' if backend else "names no backend"
        raise VllmEnvError(f"{config} {stands}.", remedy='Write backend: "python".')
    place, wanted = _ENVIRONMENT.search(text), model / manifest.archive.name
    named = place[3] if place else ""
    if not named or Path(named.replace(_MODEL_DIRECTORY, str(model))).resolve() != wanted.resolve():
        raise VllmEnvError(
            f"{config}: EXECUTION_ENV_PATH is {named!r}, and the environment that was built is {wanted}.",
            cause="Triton would take its own Python, or another environment.",
            remedy=f'Write "{_MODEL_DIRECTORY}/{manifest.archive.name}" there.',
        )
    try:
        ast.parse(_read(code), str(code))
    except (SyntaxError, ValueError) as error:
        raise VllmEnvError(f"{code} is no Python: {error}.", remedy=_COPY) from error


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError as error:
        raise VllmEnvError(f"{file} is missing.", cause="Triton loads no model without it.", remedy=_COPY) from error
    except UnicodeDecodeError as error:
        raise VllmEnvError(f"{file} is not UTF-8: {error}.", remedy=_COPY) from error
