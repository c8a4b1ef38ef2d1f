"""Undo, in a copy, the changes of Debian and Ubuntu to Python's standard library.

Their interpreters search for packages in ``dist-packages`` and install into ``local/``, except in a virtual environment.
The changed lines are the same in Ubuntu 22.04 (3.10), Debian 12 (3.11), Ubuntu 24.04 (3.12) and Debian 13 (3.13).

Most changes need no edit. Some files are left out. ``site`` is corrected at start by ``debian_site.py``, because the
program and libpython contain a frozen copy of it since 3.11. Only two files must be edited. If one of them differs from
these releases, it is refused: a guess could be wrong.
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from vllm_env import inside
from vllm_env.base.errors import VllmEnvError

LEFT_OUT = ("sitecustomize.py", "_distutils_system_mod.py", "nis.*")
"""Names in Debian's standard library that are not copied.

A link to ``/etc``, which belongs to the machine's administrator; a module that makes setuptools install into
``dist-packages``; a module that needs the NIS library.
"""

_MULTIARCH = "x86_64-linux-gnu"
_SITE_HOOK = inside.FOLDER / "debian_site.py"


class _Edit(NamedTuple):
    """A replacement in a file of the standard library; ``pattern`` must match exactly once."""

    files: tuple[str, ...]
    pattern: str
    replacement: str
    is_optional: bool = False


_EDITS = (
    # The scheme that tells pip and uv where to install; DEB_PYTHON_INSTALL_LAYOUT changes it, too.
    _Edit(
        ("sysconfig.py", "sysconfig/__init__.py"),
        r"^( +'prefix': )prefix_scheme,$",
        r"\1'posix_prefix',",
    ),
    # Up to 3.11, from the package python3-distutils: behave as in a virtual environment, which uses CPython's scheme.
    _Edit(
        ("distutils/sysconfig.py",),
        r"^(def is_virtual_environment\(\):\n    return )sys\.base_prefix != .*$",
        r"\1True",
        is_optional=True,
    ),
)


def is_debian(stdlib: Path) -> bool:
    """Return whether a standard library is Debian's or Ubuntu's."""
    site = stdlib / "site.py"
    return (stdlib / LEFT_OUT[1]).exists() or (
        site.is_file() and "dist-packages" in site.read_text("utf-8")
    )


def restore_site_packages(stdlib: Path) -> None:
    """Make a copy of Debian's standard library use ``site-packages`` for installing and importing packages.

    Raises:
        VllmEnvError: a file differs from the known releases.
    """
    for edit in _EDITS:
        file = next((stdlib / name for name in edit.files if (stdlib / name).is_file()), None)
        if file is None and edit.is_optional:
            continue
        text = file.read_text("utf-8") if file else ""
        new, count = re.subn(edit.pattern, edit.replacement, text, flags=re.MULTILINE)
        if file is None or count != 1:
            name = file.relative_to(stdlib) if file else edit.files[0]
            raise VllmEnvError(
                f"{name} of this Python is not as Debian's or Ubuntu's is known.",
                cause="Where it installs packages cannot be set for certain. Known are those of Ubuntu 22.04 (3.10), "
                "Debian 12 (3.11), Ubuntu 24.04 (3.12) and Debian 13 (3.13).",
                remedy="Give access to conda-forge, pack another interpreter (pyenv with --enable-shared), "
                "or pick another version with --python.",
            )
        file.write_text(new, "utf-8")
    # Debian's site reads this folder last. No other file will be in it.
    folder = stdlib / "dist-packages"
    folder.mkdir()
    shutil.copyfile(_SITE_HOOK, folder / "vllm_env_site.py")
    (folder / "vllm_env_site.pth").write_text("import vllm_env_site\n")


def restore_config_header(headers: Path, copy: Path) -> None:
    """Copy the ``pyconfig.h`` of this architecture into a copy of ``/usr/include/python3.11``, which only includes it."""
    real = headers.parent / _MULTIARCH / headers.name / "pyconfig.h"
    if real.is_file():
        shutil.copy(real, copy / "pyconfig.h")
