"""The files of a model's folder, apart from its environment, that belong into an image.

Weights and caches do not: they have their own volumes. Files that look like secrets are refused.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_env.base.errors import VllmEnvError
from vllm_env.layout.layouts import LAYOUT_FILES
from vllm_env.model.files import (
    CONFIG_NAME,
    ENGINE_ARGS_NAME,
    OFFICIAL_ARGS_NAME,
    read_config,
)
from vllm_env.model.manifest import CACHE_NAME
from vllm_env.publish.model_folder import WEIGHT_SUFFIXES
from vllm_env.serve.without_hub import STANDIN_NAME

_SECRET_NAME = re.compile(
    r"\.env(\..*)?|\.netrc|\.git-credentials|\.npmrc|\.pypirc|\.dockercfg|\.htpasswd|kubeconfig|"
    r"id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|jks|keystore)|"
    r"(credentials?|secrets?|passwords?|token)(\.(json|ya?ml|txt|toml|ini))?",
    re.IGNORECASE,
)
# Keys of Hugging Face, NVIDIA, OpenAI, GitHub, GitLab and AWS, private keys, and passwords in URLs.
_SECRET = re.compile(
    rb"\bhf_[A-Za-z0-9]{30}|\bnvapi-[\w-]{40}|\bsk-[\w-]{30}|\bgh[opsur]_[A-Za-z0-9]{36}|"
    rb"\bgithub_pat_\w{50}|\bglpat-[\w-]{20}|\bAKIA[A-Z0-9]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY|"
    rb"://[^\s/:@\"']+:[^\s/@\"']+@"
)
_SECRET_FIELD = re.compile(r"api_?key|hf_token|(access|auth)_?token|password|secret", re.IGNORECASE)
# A larger file holds data.
_MOST_TEXT_BYTES = 1_000_000
_REMEDY = (
    "Take it out of the model's folder, and give it to the server by its environment, such as by a "
    "Secret of Kubernetes."
)


@dataclass(frozen=True)
class OwnFiles:
    """Files and links of a model's folder.

    Attributes:
        paths: those for an image, sorted and relative to the folder.
        left_out: weights and caches, in the same form.
    """

    paths: tuple[str, ...]
    left_out: tuple[str, ...]


def find_own_files(model: Path) -> OwnFiles:
    """Return the files of a model's folder that are not the environment's.

    Raises:
        VllmEnvError: one looks like a secret, leads out of the folder, or is not a file.
    """
    paths = []
    left_out = []
    for path in _walk(model):
        name = path.rpartition("/")[2]
        if _SECRET_NAME.fullmatch(name):
            raise VllmEnvError(
                f"{model / path} looks like a secret.", cause="Its name says so.", remedy=_REMEDY
            )
        # The stand-in, a tiny model, is a part of the image.
        is_standin = path.startswith(f"{STANDIN_NAME}/")
        is_weight = path.endswith(WEIGHT_SUFFIXES) and not is_standin
        # The folder of the cache may be a link, which is then a path of its own.
        is_cache = path.partition("/")[0] == CACHE_NAME
        # Hidden files are those of editors and of git.
        is_hidden = re.search(r"(^|/)\.", path)
        is_bytecode = re.search(r"(^|/)__pycache__/|\.pyc$", path)
        if is_weight or is_cache:
            left_out.append(path)
        elif not is_hidden and not is_bytecode:
            _check_file(model, path)
            paths.append(path)
    _check_settings(model)
    return OwnFiles(tuple(sorted(paths)), tuple(sorted(left_out)))


def check_link(root: Path, path: str) -> None:
    """Raise a VllmEnvError if a link in ``root`` is absolute, or leads out of it or nowhere."""
    link = root / path
    target = link.readlink()
    is_inside = link.exists() and link.resolve().is_relative_to(root.resolve())
    if target.is_absolute() or not is_inside:
        raise VllmEnvError(
            f"{link} is a link to {target}, which an image of {root} would not have.",
            remedy="Put a copy of the file there, or take the link away.",
        )


def _walk(model: Path) -> Iterator[str]:
    """Yield the files and links of a model's folder, without its environment."""
    for folder, folders, names in os.walk(model):
        inner = os.path.relpath(folder, model)
        if inner == ".":
            # os.walk() does not enter a folder that is taken out of its list.
            folders[:] = [name for name in folders if name not in LAYOUT_FILES]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*names, *links):
            path = os.path.normpath(f"{inner}/{name}")
            if path not in LAYOUT_FILES:
                yield path


def _check_file(model: Path, path: str) -> None:
    """Check a file or link for the image.

    Raises:
        VllmEnvError: it looks like a secret, leads out of the folder, or is not a file.
    """
    file = model / path
    if file.is_symlink():
        check_link(model, path)
        return
    if not file.is_file():
        raise VllmEnvError(f"{file} is not a file.", remedy="Take it out of the model's folder.")
    if file.stat().st_size <= _MOST_TEXT_BYTES and _SECRET.search(file.read_bytes()):
        raise VllmEnvError(
            f"{file} looks like a secret.", cause="It has a key or a password.", remedy=_REMEDY
        )


def _check_settings(model: Path) -> None:
    """Check for secrets of any form, by the names of settings.

    Raises:
        VllmEnvError: the configuration or a file of engine arguments sets such a field.
    """
    parameters = read_config(model).parameters
    settings: dict[Path, Mapping[str, Any]] = {
        model / CONFIG_NAME: {name: value.string_value for name, value in parameters.items()}
    }
    for name in (ENGINE_ARGS_NAME, OFFICIAL_ARGS_NAME):
        file = model / name
        if file.is_file():
            try:
                arguments = json.loads(file.read_text("utf-8"))
            except ValueError as error:
                raise VllmEnvError(
                    f"{file} cannot be read as JSON: {error}.", remedy="Fix it."
                ) from error
            settings[file] = arguments if isinstance(arguments, dict) else {}
    for file, fields in settings.items():
        for name, value in fields.items():
            if _SECRET_FIELD.search(name) and isinstance(value, str) and value:
                raise VllmEnvError(
                    f"{file} looks like a secret.",
                    cause=f"It sets {name}.",
                    remedy=_REMEDY,
                )
