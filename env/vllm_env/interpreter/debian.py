"""Undoes what Debian and Ubuntu change in Python's standard library, in a copy of it.

Their interpreters look for packages in ``dist-packages`` and install into ``local/``, unless they run from a virtual
environment. Read in Ubuntu 22.04 (3.10), Debian 12 (3.11), Ubuntu 24.04 (3.12) and Debian 13 (3.13): the changed lines
are the same in all four. Most is undone without a change: some files are left out, and ``site`` is corrected at start by
``debian_site.py``, because the program and libpython hold a frozen copy of it since 3.11. Two files have to change; one
that is not as those releases have it is refused rather than guessed at.
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from vllm_env import inside
from vllm_env.base.errors import VllmEnvError

LEFT_OUT = ("sitecustomize.py", "_distutils_system_mod.py", "nis.*")
"""Names in Debian's standard library that are not copied: a link to ``/etc``, which belongs to the machine's
administrator; a module that makes setuptools install into ``dist-packages``; one that needs the NIS library."""

_MULTIARCH = "x86_64-linux-gnu"
_SITE_HOOK = inside.FOLDER / "debian_site.py"


class _Edit(NamedTuple):
    """A replacement in a file of the standard library; ``pattern`` must match exactly once."""

    files: tuple[str, ...]
    pattern: str
    replacement: str
    is_optional: bool = False


_EDITS = (
    # the scheme by which pip and uv choose where to install, which DEB_PYTHON_INSTALL_LAYOUT changes too
    _Edit(("sysconfig.py", "sysconfig/__init__.py"), r"^( +'prefix': )prefix_scheme,$", r"\1'posix_prefix',"),
    # up to 3.11, from the package python3-distutils: as in a virtual environment, whose scheme is that of CPython
    _Edit(
        ("distutils/sysconfig.py",),
        r"^(def is_virtual_environment\(\):\n    return )sys\.base_prefix != .*$",
        r"\1True",
        is_optional=True,
    ),
)


def is_debian(stdlib: Path) -> bool:
    """Tell whether a standard library is one of Debian or Ubuntu."""
    site = stdlib / "site.py"
    return (stdlib / LEFT_OUT[1]).exists() or (site.is_file() and "dist-packages" in site.read_text("utf-8"))


def restore_site_packages(stdlib: Path) -> None:
    """Make a copy of Debian's standard library look for packages in ``site-packages`` and install them there.

    Raises:
        VllmEnvError: a file is not as in the known releases.
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
    # the last of the folders that Debian's site looks into; nothing else will lie there
    folder = stdlib / "dist-packages"
    folder.mkdir()
    shutil.copyfile(_SITE_HOOK, folder / "vllm_env_site.py")
    (folder / "vllm_env_site.pth").write_text("import vllm_env_site\n")


def restore_config_header(headers: Path, copy: Path) -> None:
    """Put the ``pyconfig.h`` of this architecture into a copy of ``/usr/include/python3.11``, whose own only includes it."""
    real = headers.parent / _MULTIARCH / headers.name / "pyconfig.h"
    if real.is_file():
        shutil.copy(real, copy / "pyconfig.h")
