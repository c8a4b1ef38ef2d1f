"""Omit the files of an environment that its profile cannot use; each rule has its reason.

A rule removes whole files and folders, or parts of a file. ``--keep NAME`` turns a rule off.
"""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.elf import NEVER_ELF

from .strip import strip_symbols


@dataclass(frozen=True)
class Rule:
    """Files and folders to omit.

    Attributes:
        name: the rule's name for ``--keep``.
        reason: why the files are not needed.
        pattern: regular expression for the whole path relative to the prefix.
        profiles: the profiles for which the rule applies.
        inside: keep the files, but remove their symbol tables and debug information.
    """

    name: str
    reason: str
    pattern: str
    profiles: tuple[str, ...] = ("cpu", "cuda")
    inside: bool = False


_SITE = r"lib/python3\.\d+/site-packages"
# As ziglang names the processor of this machine in its folders.
_ZIG_MACHINE = "aarch64" if platform.machine() == "aarch64" else "x86"
RULES = (
    Rule("static-libraries", "nothing links against them at run time", r".*\.(a|la)"),
    Rule("debug-symbols", "a debugger reads them, a server does not", r".*\.(dbg|debug|pdb)"),
    # Not in ziglang, whose own library has folders of that name.
    Rule("tests", "packages carry their own tests", rf"{_SITE}/(?!ziglang/).+/tests?"),
    Rule(
        "test-programs",
        "PyTorch's wheel carries its C++ unit tests",
        rf"{_SITE}/torch/bin/(test_[^/]+|[^/]+StoreTest)",
    ),
    Rule(
        "intel-offload",
        "drivers with which Intel's OpenMP offloads to Intel GPUs; "
        "vLLM on a CPU only needs libiomp5",
        r"lib/lib(omptarget|sycl|ur_|pi_|iompstubs5|archer).*",
        ("cpu",),
    ),
    # The compiler of relocate.py targets this kind of machine only.
    Rule(
        "other-targets",
        "headers with which ziglang compiles for other systems and processors",
        rf"{_SITE}/ziglang/lib/libc/include/"
        rf"(?!(any-linux-any|generic-glibc|{_ZIG_MACHINE}-linux-(any|gnu))$)[^/]+",
    ),
    Rule("pkg-config", "only builds read them", r"(lib|share)/pkgconfig"),
    Rule("manuals", "nobody reads manuals in a server's environment", r"share/(man|doc|info)"),
    # Last, because the first rule that matches a file counts, and this one matches every file.
    Rule(
        "symbols",
        "tables in programs and libraries that a debugger reads and the loader does not",
        r".+",
        inside=True,
    ),
)


def rules_for(profile: str, keep: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules of a profile except those named in ``keep``."""
    return tuple(rule for rule in RULES if profile in rule.profiles and rule.name not in keep)


def prune(prefix: Path, rules: tuple[Rule, ...]) -> None:
    """Remove from a prefix the files that the rules name."""
    for path, rule in _matches(prefix, rules):
        if rule.inside:
            strip_symbols(path)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _matches(prefix: Path, rules: tuple[Rule, ...]) -> Iterator[tuple[Path, Rule]]:
    """Yield files and folders of a prefix with the first rule that matches them."""
    compiled = [(re.compile(rule.pattern), rule) for rule in rules]
    # The patterns are for the path relative to the prefix, which begins here.
    start = len(f"{prefix}/")
    for folder, folders, files in os.walk(prefix):
        for name in [*files, *folders]:
            # A string, not a Path: an environment has 80,000 files.
            path = f"{folder}/{name}"
            matches = (rule for pattern, rule in compiled if pattern.fullmatch(path, start))
            rule = next(matches, None)
            if rule is None:
                continue
            has_symbols = name not in folders and not name.endswith(NEVER_ELF)
            if rule.inside and not has_symbols:
                continue
            if name in folders:
                # os.walk then does not enter the folder, which the caller removes.
                folders.remove(name)
            yield Path(path), rule
