"""Places in a prefix what makes it work without activation (see runtime_hook.py)."""

import re
import shutil
from pathlib import Path

import conda_pack

from vllm_env import inside
from vllm_env.base.process import capture

COMPILER = "vllm-env-cc"
"""The environment's own C compiler, which the model names as CC where the container has none (triton_vllm's compilers.py)."""
# Triton (the GPU kernel compiler) compiles a launcher in C for each kernel. The symbols of an old C library run anywhere.
_COMPILER = """\
#!/bin/sh
prefix=$(dirname -- "$(dirname -- "$(realpath -- "$0")")")
: "${{ZIG_GLOBAL_CACHE_DIR:=${{XDG_CACHE_HOME:-${{TMPDIR:-/tmp}}}}/vllm_env_cc-$(id -u)}}"
export ZIG_GLOBAL_CACHE_DIR
exec "$prefix/{packages}/ziglang/zig" cc -target x86_64-linux-gnu.2.28 "$@"
"""
_SCRIPTS = Path(conda_pack.__file__).with_name("scripts") / "posix"
_HOOK = inside.FOLDER / "runtime_hook.py"
_MODULE = "_vllm_env_runtime"
# Sorted before the .pth files of packages, so that these already run with UTF-8.
_PTH = "00_vllm_env.pth"
_NOT_BAKED = re.compile(r"^(_|SHLVL|PWD|OLDPWD|PATH|LD_LIBRARY_PATH|PS1|CONDA_.*|BASH.*)$")


def site_packages(prefix: Path) -> Path:
    """Return the prefix's ``lib/pythonX.Y/site-packages``."""
    return next(p for p in sorted(prefix.glob("lib/python3.*/site-packages")) if p.is_dir())


def install_runtime(prefix: Path, identity: str) -> None:
    """Place the start-up hook, and the variables that it sets: those of the packages' ``activate.d`` scripts, and our own.

    ``identity`` tells environments apart, such as a lock's digest. Compiled kernels are kept by it: they include headers
    of this very environment, and torch would share them in ``/tmp/torchinductor_USER`` with every other one.
    """
    packages = site_packages(prefix)
    if (packages / "ziglang" / "zig").is_file():
        (prefix / "bin" / COMPILER).write_text(_COMPILER.format(packages=packages.relative_to(prefix)))
        (prefix / "bin" / COMPILER).chmod(0o755)
    # Triton looks for bin/activate also in an unpacked environment, to which no conda-pack adds it
    for name in ("activate", "deactivate"):
        shutil.copyfile(_SCRIPTS / name, prefix / "bin" / name)
    shutil.copyfile(_HOOK, packages / f"{_MODULE}.py")
    (packages / _PTH).write_text(f"import {_MODULE}\n")
    variables = activation_variables(prefix)
    variables["TORCHINDUCTOR_CACHE_DIR"] = f"{{cache}}/vllm_env/inductor/{identity[:16]}"
    lines = [f"{name}={value.replace(str(prefix), '{prefix}')}\n" for name, value in sorted(variables.items())]
    (packages / "_vllm_env_variables.txt").write_text("".join(lines), "utf-8")


def activation_variables(prefix: Path) -> dict[str, str]:
    """Return what the scripts in ``etc/conda/activate.d`` set, by running them in bash; multi-line values are omitted."""
    scripts = sorted((prefix / "etc/conda/activate.d").glob("*.sh"))
    if not scripts:
        return {}
    environment = {"PATH": "/usr/bin:/bin", "CONDA_PREFIX": str(prefix), "HOME": "/nonexistent"}
    sourced = "; ".join(f'. "{script}"' for script in scripts)
    _, output = capture(["bash", "-c", f"exec 2>/dev/null; cd /; {sourced}; env -0"], env=environment)
    pairs = (item.partition("=") for item in output.split("\0") if "\n" not in item and "=" in item)
    return {n: v for n, _, v in pairs if not _NOT_BAKED.match(n) and environment.get(n) != v}
