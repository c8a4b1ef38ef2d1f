"""Takes over a model folder of Triton's official vLLM backend, in place, and gives it back.

``config.pbtxt`` is edited and the model's code placed; ``1/model.json`` stays the one file of engine arguments. What stood
there before is kept in ``.before_vllm_env/``, laid out as the model's folder is. Triton takes only folders with a number for
versions, and says at a load that it ignores that one (seen with 24.10).
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.base.filesystem import give_as, give_tree, link_or_copy, make_readable, mounts_in, owner_of, sync, write_whole
from vllm_env.base.workspace import Workspace
from vllm_env.model.files import (
    CODE,
    CONFIG_NAME,
    ENVIRONMENT,
    MODEL_DIRECTORY,
    OFFICIAL_ARGS,
    arguments_file,
    check_engine_args,
    parse_config,
)
from vllm_env.model.manifest import CACHE_NAME

from .changes import refuse_changes, state_of
from .exchange import STAGING, exchange, publishing, refuse_mounts, remove_abandoned_staging, staging_in
from .model_config import rewrite_config
from .model_folder import BUILT_NAMES, BuiltSet
from .publish import staging_place

BACKUP_NAME = ".before_vllm_env"
LORA_NAME = "multi_lora.json"
_CODE_NAMES = ("model.py", "triton_vllm")
_PLACED = (*BUILT_NAMES, CACHE_NAME, *(f"{CODE}/{name}" for name in _CODE_NAMES))
_CHANGED = (CONFIG_NAME, *_PLACED)
_EDITED = (CONFIG_NAME, f"{CODE}/{_CODE_NAMES[0]}")
_copy_file = partial(shutil.copy2, follow_symlinks=False)


@dataclass(frozen=True)
class Adoption:
    """What adopting a folder changes in it, known before anything is built.

    ``template`` is this project's own model; ``before`` is ``config.pbtxt`` as it stands and ``config`` as it will; ``saved``
    names what the backup lacks; ``diff`` has the changed files, empty if none changes; ``own`` has the JSON
    documents with which the model is served, by their path in its folder.
    """

    template: Path
    before: bytes
    config: str
    saved: tuple[str, ...]
    diff: str
    own: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class AdoptedSet(BuiltSet):
    """A built set for a folder that is adopted."""

    adoption: Adoption = field(kw_only=True)

    def prepare(self, current: Path, new: Path) -> None:
        """Write into ``new`` the backup of what stands in ``current``, and the model's code."""
        if (current / CONFIG_NAME).read_bytes() != self.adoption.before:
            what = f"{current / CONFIG_NAME} was changed while the environment was built."
            raise VllmEnvError(what, cause="The change would be lost.", remedy="Adopt it again.")
        with staging_in(new) as staged:
            for name in self.adoption.saved:  # what people edit in place is copied, gigabytes are linked
                small = name == CONFIG_NAME or name.startswith(f"{CODE}/")
                _copy(current / name, staged / BACKUP_NAME / name, _copy_file if small else link_or_copy)
            if self.adoption.saved:
                give_as(staged / BACKUP_NAME, current)
                _add(staged / BACKUP_NAME, new / BACKUP_NAME)
            for name, source in _code(self.adoption.template / CODE).items():
                (staged / CODE / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, staged / CODE / name)
            make_readable(staged / CODE)
            give_tree(staged / CODE, owner_of(new / CODE))
            for name in _CODE_NAMES:
                _put(staged / CODE / name, new / CODE / name, staged / name)

    def switch(self, new: Path) -> None:
        """Let the configuration name the Python backend and the environment, as the last step."""
        write_whole(new / CONFIG_NAME, self.adoption.config)


def read_adoption(model: Path, template: Path, environment: str) -> Adoption:
    """Return what adopting ``model`` would change; nothing is written.

    ``environment`` is the name of the environment in the model's folder.

    Raises:
        UsageError: there is no such folder.
        VllmEnvError: it is no model of the official backend nor an adopted one, or cannot be adopted; it says what to do.
    """
    _require_folder(model)
    file = model / CONFIG_NAME
    text = _read(file)
    _check_version(model)
    config = parse_config(file, text)
    _check_backend(model, config.backend, config.parameters[ENVIRONMENT].string_value)
    own = _own_documents(model)
    check_engine_args(model)
    new = rewrite_config(file, text, parse_config(template / CONFIG_NAME, _read(template / CONFIG_NAME)), environment)
    saved = _CHANGED
    if os.path.lexists(model / BACKUP_NAME / CONFIG_NAME):
        saved = _edited_since(model, text) if config.backend == "vllm" else ()
    elif os.path.lexists(model / BACKUP_NAME):
        cause = "It is where adopt keeps what a model was, and its way back would remove what is in it."
        raise VllmEnvError(f"{model / BACKUP_NAME} is there and holds no {CONFIG_NAME}.", cause=cause, remedy="Rename it.")
    return Adoption(template, file.read_bytes(), new, saved, _difference(model, template, text, new), own)


def _require_folder(model: Path) -> None:
    if not model.is_dir():
        raise UsageError(f"{model} is not a folder.", remedy="Name a model's folder, the one with config.pbtxt.")


def _edited_since(model: Path, config: str) -> tuple[str, ...]:
    """Return what someone has changed who has put the official configuration back by hand, over an older backup."""
    texts = {CONFIG_NAME: config, _EDITED[1]: _text(model / _EDITED[1])}
    ours = "triton_vllm" in texts[_EDITED[1]]
    return tuple(n for n, text in texts.items() if text != _text(_backed_up(model, n)) and not (ours and n != CONFIG_NAME))


def undo_difference(model: Path, template: Path) -> str:
    """Return what `undo` will change in ``config.pbtxt``, and which files beside the code of ``template`` it will remove.

    Raises:
        UsageError: there is no such folder.
        VllmEnvError: there is nothing to go back to.
    """
    _require_folder(model)
    if not os.path.lexists(model / BACKUP_NAME / CONFIG_NAME):
        raise VllmEnvError(
            f"{model} holds no {BACKUP_NAME}/{CONFIG_NAME}.",
            cause="It was not adopted, or what it was before has been removed.",
            remedy="Name an adopted model's folder.",
        )
    before = _backed_up(model, CONFIG_NAME)
    if not before.is_file():
        raise VllmEnvError(
            f"{model / CONFIG_NAME} was a link to {before}, which is no file.",
            cause="The model would have no configuration.",
            remedy=f"Put that file back, or a configuration in the place of the link {BACKUP_NAME}/{CONFIG_NAME}.",
        )
    known = _code(template / CODE).keys() | _code(model / BACKUP_NAME / CODE).keys()
    lines = (f"goes: {CODE}/{name}\n" for name in sorted(_code(model / CODE).keys() - known))
    return _unified(CONFIG_NAME, _text(model / CONFIG_NAME), _text(before)) + "".join(lines)


def _backed_up(model: Path, name: str) -> Path:
    """Return the file as it was before; a link in the backup says where it led from its place in the model's folder."""
    backup = model / BACKUP_NAME / name
    return (model / name).parent / backup.readlink() if backup.is_symlink() else backup


def undo(workspace: Workspace, model: Path) -> None:
    """Make an adopted model's folder what it was before, in one step; the user's other files stay as they are now.

    Raises:
        VllmEnvError: there is nothing to go back to, or a volume is mounted over what would be removed.
    """
    undo_difference(model, model)
    try:
        with publishing(workspace, model.parent):
            remove_abandoned_staging(model.parent)
            refuse_mounts(model, (*_CHANGED, BACKUP_NAME))
            place = staging_place(model)
            if place is None or not _undo_by_exchange(model, place):
                _undo_in_place(model)
    except OSError as error:
        what = f"{model} cannot be given back: {error.strerror} ({error.filename or model})."
        raise VllmEnvError(what, remedy="Free space or change the permissions, and try again.") from error


def _undo_by_exchange(model: Path, place: Path) -> bool:
    ours = {model / name for name in (*_CHANGED, BACKUP_NAME)}

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if Path(folder, n) in ours or n.startswith(STAGING)]

    with staging_in(place) as staging:
        new, before = staging / model.name, state_of(model, BUILT_NAMES)
        shutil.copytree(model, new, symlinks=True, ignore=ignore, copy_function=link_or_copy)
        give_as(new, model)
        for name in _CHANGED:
            _copy(model / BACKUP_NAME / name, new / name)
        sync(new)
        refuse_changes(model, new, before, BUILT_NAMES)
        done = exchange(new, model)
        sync(model.parent)
        return done


def _undo_in_place(model: Path) -> None:
    """Restore the configuration first, with which Triton serves what it did, and remove the backup last."""
    with staging_in(model) as staging:
        for name in _CHANGED:
            _copy(model / BACKUP_NAME / name, staging / name)
        (staging / CONFIG_NAME).replace(model / CONFIG_NAME)
        for name in _PLACED:
            old = staging / "old" / name
            old.parent.mkdir(parents=True, exist_ok=True)
            _put(staging / name, model / name, old)
        (model / BACKUP_NAME).rename(staging / BACKUP_NAME)
        sync(model)


def _put(made: Path, target: Path, old: Path) -> None:
    """Rename what was made, if anything, to its place, and what is there, if anything, to ``old``."""
    for source, place in ((target, old), (made, target)):
        if os.path.lexists(source):
            source.rename(place)


def _add(made: Path, backup: Path) -> None:
    """Add to a backup what it lacks; of what it has, what people edit is replaced, the configuration as the last step."""
    if not os.path.lexists(backup):
        made.rename(backup)
        return
    for name in (*_PLACED, CONFIG_NAME):
        if os.path.lexists(made / name) and (name in _EDITED or not os.path.lexists(backup / name)):
            (backup / name).parent.mkdir(exist_ok=True)
            (made / name).rename(backup / name)


def _copy(source: Path, target: Path, copy: Callable[..., object] = link_or_copy) -> None:
    """Copy a file, link or folder if it is there, files as hard links: nothing here writes into a file that stands."""
    if not os.path.lexists(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=copy)
    else:
        copy(str(source), str(target))


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")  # read_text() would change the ends of lines
    except FileNotFoundError as error:
        cause = "Every model of Triton's has one; without it the official backend's model is not served either."
        raise VllmEnvError(
            f"{file} is missing.", cause=cause, remedy="Name a model's folder, the one with config.pbtxt."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise VllmEnvError(f"{file} cannot be read: {error}.", remedy="Change its permissions, or write it as UTF-8.") from error


def _check_version(model: Path) -> None:
    """Refuse a model that is not one folder ``1``, which is the version that a build completes."""
    # Triton passes over names with leading zeros
    versions = sorted(path.name for path in model.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name) and path.is_dir())
    code = model / CODE
    if versions != [CODE]:
        found = f"the versions {', '.join(versions)}" if versions else "no version"
        remedy = f"Leave one folder, {CODE}/ with model.json; make a model of its own of each other version."
        raise VllmEnvError(f"{model} has {found}, and a model is adopted with version {CODE} alone.", remedy=remedy)
    if code.is_symlink() or code.resolve() in mounts_in(code):
        remedy = "Put a folder there, with links in it to what lies elsewhere."
        raise VllmEnvError(f"{code} is a link or a mount point.", cause="What lies elsewhere cannot be put back.", remedy=remedy)
    refuse_mounts(model, (*_CHANGED, BACKUP_NAME))


def _check_backend(model: Path, backend: str, environment: str) -> None:
    ours = backend == "python" and environment.startswith(MODEL_DIRECTORY) and (model / CODE / "triton_vllm").is_dir()
    if ours and not os.path.lexists(model / BACKUP_NAME / CONFIG_NAME):
        raise VllmEnvError(
            f"{model} is a model of this project, and was not adopted.",
            cause="There is nothing to go back to, and its environment would be kept beside the new one.",
            remedy=f"Build for it: ./gen_vllm_env.sh --model-repository {model.parent} --model {model.name}",
        )
    if backend != "vllm" and not ours:
        raise VllmEnvError(
            f'{model / CONFIG_NAME} names the backend "{backend}".',
            cause='Only a model of Triton\'s vLLM backend (backend: "vllm") can be adopted, or one that was adopted before.',
            remedy="Name such a model's folder.",
        )


def _own_documents(model: Path) -> dict[str, dict[str, Any]]:
    """Return the model's engine arguments and adapters by file, folders of the model's by their whole path."""
    name = arguments_file(model)
    if not (model / name).is_file():
        what = f"{model / OFFICIAL_ARGS} is missing."
        raise VllmEnvError(what, cause="It holds the engine arguments.", remedy='Write it, e.g. {"model": "…"}.')
    arguments = _json_object(model / name)
    documents = {name: arguments | _whole_paths(model, {k: arguments.get(k) for k in ("model", "tokenizer")})}
    enabled = str(arguments.get("enable_lora", "")).lower() == "true"  # else neither backend reads the adapters' file
    lora = next((n for n in (f"{CODE}/{LORA_NAME}", LORA_NAME) if (model / n).is_file()), "")
    if lora and enabled:
        adapters = _json_object(model / lora)
        documents[lora] = adapters | _whole_paths(model, adapters)
    return documents


def _whole_paths(model: Path, named: dict[str, Any]) -> dict[str, str]:
    strings = {key: model / value for key, value in named.items() if isinstance(value, str) and value.strip("./")}
    return {key: str(path) for key, path in strings.items() if os.path.isdir(path)}  # noqa: PTH112 - False where one may not look


def _json_object(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise VllmEnvError(f"{file} is not JSON: {error}.", remedy="Mend it.") from error
    if not isinstance(document, dict):
        remedy = 'Write {"NAME": "PATH", …}.' if file.name == LORA_NAME else 'Write {"model": "…", …}.'
        raise VllmEnvError(f"{file} holds a JSON {type(document).__name__}, not an object.", remedy=remedy)
    return document


def _difference(model: Path, template: Path, before: str, after: str) -> str:
    """Return the unified diff of every file that stands there and changes, and one line with what is new."""
    parts = [_unified(CONFIG_NAME, before, after)]
    old, new = _code(model / CODE), _code(template / CODE)
    names = sorted(old.keys() | new.keys() if old else ())
    parts += [_unified(f"{CODE}/{name}", _text(old.get(name)), _text(new.get(name))) for name in names]
    if not old:
        parts.append(f"new: {CODE}/model.py, {CODE}/triton_vllm/ ({len(new) - 1} files)\n")
    return "".join(parts)


def _code(folder: Path) -> dict[str, Path]:
    """Return the model's code by its path in the version folder."""
    files: Iterable[Path] = (folder / _CODE_NAMES[0], *(folder / _CODE_NAMES[1]).rglob("*.py"))
    return {file.relative_to(folder).as_posix(): file for file in files if file.is_file()}


def _text(file: Path | None) -> str:
    return file.read_bytes().decode("utf-8", "replace") if file and file.is_file() else ""


def _unified(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"{name} (now)", f"{name} (then)", lineterm="")
    return "".join(f"{line}\n" for line in lines)
