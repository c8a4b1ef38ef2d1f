"""Run the environment's own C compiler as Triton's kernel compiler will on a GPU."""
# A serving container has no compiler, and the first kernel on a GPU would fail.

from pathlib import Path

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace
from vllm_env.prefix.relocate import COMPILER

_SOURCE = """\
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher"};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


def check_compiler(workspace: Workspace, environment: Path) -> None:
    """Compile an extension module with the compiler in an environment; do nothing if it has none.

    Raises:
        VllmEnvError: the environment has no ``Python.h``.
        CommandError: the compilation fails; ``tail`` has the compiler's output.
    """
    compiler = environment / "bin" / COMPILER
    if not compiler.is_file():
        return
    header_folders = [file.parent for file in environment.glob("include/python3.*/Python.h")]
    if not header_folders:
        # Debian has the headers in a package of their own.
        raise VllmEnvError(
            "The environment has no Python.h.",
            cause="GPU kernels are compiled with it.",
            remedy=(
                "Install the headers of this machine's Python "
                "(apt-get install libpythonX.Y-dev) and build again."
            ),
        )
    with workspace.cache.staging() as folder:
        options = [f"-I{header_folder}" for header_folder in header_folders]
        try:
            compile_library(compiler, _SOURCE, folder / "launcher.so", "-O3", *options)
        except CommandError as error:
            raise CommandError(
                error.what,
                tail=error.tail,
                cause="GPU kernels need it.",
                remedy=(
                    "Build it again. If a rule removed files that the compiler reads, "
                    "add --keep tests --keep other-targets."
                ),
            ) from error


def compile_library(compiler: Path, source: str, library: Path, *options: str) -> None:
    """Compile a shared library from C source.

    Raises:
        CommandError: the compilation fails.
    """
    file = library.with_suffix(".c")
    file.write_text(source)
    # The environment's compiler is zig, which would put its cache into the home. Empty values
    # remove the user's own settings for compilers.
    variables = {"ZIG_GLOBAL_CACHE_DIR": str(library.parent / "cache"), "CC": "", "CPATH": ""}
    command = [compiler, file, *options, "-shared", "-fPIC", "-o", library]
    run(command, what=f"compile {library.name} with {compiler}", env=variables)
