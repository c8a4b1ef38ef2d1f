"""What Debian and Ubuntu change in the standard library, undone in a copy of it.

The files are small stand-ins with the lines that matter; ``test_interpreter.py`` packs this machine's own interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from vllm_env.base.errors import VllmEnvError
from vllm_env.interpreter import debian

if TYPE_CHECKING:
    from pathlib import Path

SYSCONFIG = """
def _get_preferred_schemes():
    prefix_scheme = 'posix_local'
    return {
        'prefix': prefix_scheme,
        'home': 'posix_home',
    }
"""
DISTUTILS = """
def is_virtual_environment():
    return sys.base_prefix != sys.prefix or hasattr(sys, "real_prefix")
"""


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    """A standard library with Debian's changes, laid out as up to 3.12."""
    (tmp_path / "site.py").write_text('    "dist-packages"\n')
    (tmp_path / "sysconfig.py").write_text(SYSCONFIG)
    return tmp_path


def test_debians_is_known_by_what_it_changes(stdlib: Path, tmp_path: Path) -> None:
    """Its site module names dist-packages, and its module for setuptools is there; CPython's has neither."""
    assert debian.is_debian(stdlib)
    (stdlib / "site.py").write_text('    "site-packages"\n')
    assert not debian.is_debian(stdlib)
    (stdlib / "_distutils_system_mod.py").touch()
    assert debian.is_debian(stdlib)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sysconfig.py", SYSCONFIG.replace("prefix_scheme,", "scheme_of_prefix,")),
        ("sysconfig.py", SYSCONFIG + SYSCONFIG),
        ("distutils/sysconfig.py", DISTUTILS.replace("sys.base_prefix !=", "sys.prefix !=")),
    ],
)
def test_a_text_that_is_not_known_is_refused_by_name(stdlib: Path, name: str, text: str) -> None:
    """A line that is not there, or there twice, is not guessed at: packages would land where nobody looks."""
    (stdlib / name).parent.mkdir(exist_ok=True)
    (stdlib / name).write_text(text)
    with pytest.raises(VllmEnvError, match=rf"^{name} of this Python differs from the known releases") as caught:
        debian.restore_site_packages(stdlib)
    assert "Ubuntu 24.04 (3.12)" in caught.value.cause
    assert "conda-forge" in caught.value.remedy


def test_the_site_hook_reads_pth_files_once_and_leaves_the_path(tmp_path: Path) -> None:
    """The hook alone, in an interpreter that is not Debian's and starts without site: what it adds, and no more."""
    packages = tmp_path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    folder = packages.with_name("dist-packages")
    for place in (packages, folder):
        place.mkdir(parents=True)
    (packages / "count.pth").write_text("import sys; sys.count = getattr(sys, 'count', 0) + 1\n")
    (folder / "vllm_env_site.py").write_bytes(debian._SITE_HOOK.read_bytes())
    (folder / "vllm_env_site.pth").write_text("import vllm_env_site\n")
    code = (
        f"import site, sys; site.PREFIXES = ['', {str(tmp_path)!r}, {str(tmp_path)!r}]; before = list(sys.path);"
        f"site.addsitedir({str(folder)!r});"
        "print(sys.count, [p for p in sys.path if p not in before], site.getsitepackages(), site.getsitepackages(['/x']))"
    )
    output = subprocess.check_output([sys.executable, "-I", "-S", "-c", code], text=True).strip()
    elsewhere = packages.relative_to(tmp_path)
    assert output == f"1 {[str(packages)]} {[str(packages)]} {['/x/' + str(elsewhere)]}"


def test_the_config_header_is_that_of_the_architecture(tmp_path: Path) -> None:
    """Debian's own only includes it, from a folder that no include path of an environment has."""
    headers, copy = tmp_path / "include/python3.11", tmp_path / "copy"
    real = tmp_path / "include/x86_64-linux-gnu/python3.11"
    for folder in (headers, copy, real):
        folder.mkdir(parents=True)
    (copy / "pyconfig.h").write_text("#include <x86_64-linux-gnu/python3.11/pyconfig.h>\n")
    debian.restore_config_header(headers, copy)
    assert "#include" in (copy / "pyconfig.h").read_text()
    (real / "pyconfig.h").write_text("#define SIZEOF_LONG 8\n")
    debian.restore_config_header(headers, copy)
    assert (copy / "pyconfig.h").read_text() == "#define SIZEOF_LONG 8\n"
