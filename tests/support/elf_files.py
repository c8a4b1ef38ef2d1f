"""Small real ELF files, compiled for a test: libraries with a name and symbol versions, and programs that need them."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_library(
    folder: Path,
    soname: str,
    version: str = "",
    *,
    symbol: str = "answer",
    body: str = "return 42;",
    debug: bool = False,
    needs: tuple[Path, ...] = (),
    uses: str = "",
    linker: tuple[str, ...] = (),
) -> Path:
    """Compile a library that defines one function, at a symbol version such as ``GLIBCXX_3.4.99`` if one is given.

    With ``debug`` it has debug information and a symbol table of over 64 KiB. ``needs`` are libraries that it names, of
    which it calls the function ``uses``; ``linker`` has options of ld.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{soname}.map"
    script.write_text(f"{version or 'NONE'} {{ global: {symbol}; }};\n")
    options = [f"-Wl,--version-script={script}"] if version else []
    source = f"int {symbol}(void) {{ {body} }}\n"
    if uses:
        source += f"int {uses}(void);\nint calls_{uses}(void) {{ return {uses}(); }}\n"
    if debug:
        options.append("-g")
        source += "".join(
            f"static __attribute__((used)) int local_function_{i}(int x) {{ return x + {i}; }}\n" for i in range(3000)
        )
    options += _linked(needs, linker)
    return _compile(folder / soname, source, "-shared", "-fPIC", f"-Wl,-soname,{soname}", *options)


def make_program(
    target: Path,
    libraries: tuple[Path, ...] = (),
    *,
    run_path: str = "",
    body: str = "return answer() != 42;",
    linker: tuple[str, ...] = (),
) -> Path:
    """Compile a program that calls ``answer()`` of the libraries; ``linker`` has options of ld."""
    target.parent.mkdir(parents=True, exist_ok=True)
    options = _linked(libraries, linker)
    options += [f"-Wl,--enable-new-dtags,-rpath,{run_path}"] if run_path else []
    declared = "int answer(void);" if libraries else ""
    return _compile(target, f"#include <stdio.h>\n{declared}\nint main(void) {{ {body} }}\n", *options)


def soname_of(library: Path) -> str:
    """Return the name by which ld.so knows a library that is loaded."""
    listing = subprocess.check_output(["readelf", "-dW", library], text=True)
    return next(line.partition("[")[2].rstrip("]") for line in listing.splitlines() if "(SONAME)" in line)


def _linked(libraries: tuple[Path, ...], linker: tuple[str, ...]) -> list[str]:
    options = ["-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined", *map(str, libraries)]
    return [*options, *([f"-Wl,{','.join(linker)}"] if linker else [])]


def _compile(target: Path, source: str, *options: str) -> Path:
    subprocess.run(["cc", "-x", "c", "-", "-x", "none", *options, "-o", target], input=source.encode(), check=True)
    return target
