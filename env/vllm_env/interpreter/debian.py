"""Undo, in a copy, the changes of Debian and Ubuntu to Python's standard library.

Their interpreters search for packages in ``dist-packages`` and install into ``local/``, except in a
virtual environment. The changed lines are the same in Ubuntu 22.04 (3.10), Debian 12 (3.11), Ubuntu
24.04 (3.12) and Debian 13 (3.13).

Three steps undo the changes. Some files are left out. Two files are edited; if one of them differs
from these releases, it is refused, because a guess could be wrong. ``debian_site.py`` corrects
``site`` at the interpreter's start.
"""

import re
import shutil
from pathlib import Path

from vllm_env import inside
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.machine import this_platform

LEFT_OUT = ("sitecustomize.py", "_distutils_system_mod.py", "nis.*")
"""Names in Debian's standard library that are not copied.

The first is a link to ``/etc``, which belongs to the machine's administrator. The second makes
setuptools install into ``dist-packages``. The third needs the NIS library.
"""

_SITE_HOOK = inside.FOLDER / "debian_site.py"


def is_debian(stdlib: Path) -> bool:
    """Return whether a standard library is Debian's or Ubuntu's."""
    site = stdlib / "site.py"
    if (stdlib / "_distutils_system_mod.py").exists():
        return True
    return site.is_file() and "dist-packages" in site.read_text("utf-8")


def restore_site_packages(stdlib: Path) -> None:
    """Make a copy of Debian's standard library install into ``site-packages`` and import from it.

    Raises:
        VllmEnvError: a file differs from the known releases.
    """
    # The scheme that says where pip and uv install. DEB_PYTHON_INSTALL_LAYOUT changes it, too.
    sysconfig = stdlib / "sysconfig/__init__.py"  # of 3.13
    if not sysconfig.is_file():
        sysconfig = stdlib / "sysconfig.py"
    _replace(stdlib, sysconfig, r"^( +'prefix': )prefix_scheme,$", r"\1'posix_prefix',")
    # Up to 3.11, in python3-distutils. In a virtual environment, it has CPython's scheme.
    distutils = stdlib / "distutils/sysconfig.py"
    if distutils.is_file():
        virtual = r"^(def is_virtual_environment\(\):\n    return )sys\.base_prefix != .*$"
        _replace(stdlib, distutils, virtual, r"\1True")
    # site.py cannot be edited: since 3.11, the program and libpython contain a frozen copy of it.
    # Debian's site reads this folder last. No other file will be in it.
    folder = stdlib / "dist-packages"
    folder.mkdir()
    shutil.copyfile(_SITE_HOOK, folder / "vllm_env_site.py")
    (folder / "vllm_env_site.pth").write_text("import vllm_env_site\n")


def _replace(stdlib: Path, file: Path, pattern: str, replacement: str) -> None:
    """Make the one replacement in a file; raise VllmEnvError if it cannot be made exactly once."""
    text = file.read_text("utf-8") if file.is_file() else ""
    new, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    if count != 1:
        raise VllmEnvError(
            f"{file.relative_to(stdlib)} of this Python differs from the known releases of Debian "
            "and Ubuntu.",
            cause="So the packager cannot set where this Python installs packages. It knows "
            "Ubuntu 22.04 (3.10), Debian 12 (3.11), Ubuntu 24.04 (3.12) and Debian 13 (3.13).",
            remedy="Give access to conda-forge, pack another interpreter (pyenv with "
            "--enable-shared), or pick another version with --python.",
        )
    file.write_text(new, "utf-8")


def restore_config_header(headers: Path, copy: Path) -> None:
    """Put this architecture's ``pyconfig.h`` into a copy of Debian's headers."""
    # The one in /usr/include/python3.11 only includes it, from a folder next to python3.11.
    real = headers.parent / this_platform().multiarch / headers.name / "pyconfig.h"
    if real.is_file():
        shutil.copy(real, copy / "pyconfig.h")
