"""An interpreter of this machine, and its conda package."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from support.repositories import CHECKOUT
from support.small_fixtures import PYTHON
from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.machine import NEUTRAL_PREFIX
from vllm_env.interpreter import debian as debian_stdlib
from vllm_env.interpreter import find, package
from vllm_env.interpreter.find import Interpreter, find_interpreter
from vllm_env.interpreter.package import make_package


def _run(prefix: Path, code: str) -> str:
    return subprocess.check_output(
        [prefix / "bin/python", "-I", "-c", code], text=True, env={"PATH": "/usr/bin:/bin"}, stderr=subprocess.STDOUT
    ).strip()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root becomes another user")
def test_a_folder_of_another_user_is_passed_over(tmp_path: Path) -> None:
    """PYENV_ROOT and PATH may still name root's, after a change of user that keeps the variables."""
    private = tmp_path / "private"
    (private / "pyenv").mkdir(parents=True)
    private.chmod(0o700)
    other_user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    environment = {"PYTHONPATH": str(CHECKOUT / "env"), "PYENV_ROOT": str(private / "pyenv")}
    environment["PATH"] = f"{private}:/usr/bin:/bin"
    if subprocess.run([*other_user, sys.executable, "-c", "import vllm_env"], env=environment, cwd="/", check=False).returncode:
        pytest.skip(f"another user cannot run {sys.executable}")
    code = "from vllm_env.interpreter.find import find_interpreter; find_interpreter('3.99')"
    done = subprocess.run(
        [*other_user, sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/", check=False
    )
    assert "There is no Python 3.99 to pack" in done.stderr


def test_an_interpreter_with_a_shared_libpython_is_found() -> None:
    """The stub loads libpython, so only an interpreter that has one will do."""
    found = find_interpreter(PYTHON)
    assert found.version.startswith(PYTHON + ".")
    assert found.library.name.startswith(f"libpython{PYTHON}.so")
    assert found.library.is_file()


def test_a_python_that_is_not_there_is_refused_with_where_was_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message names the version, what was looked at and why it will not do, and how to get one."""
    program = tmp_path / "python3.99"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VllmEnvError, match=r"no Python 3\.99 to pack") as caught:
        find_interpreter("3.99")
    assert f"{program} (does not start)" in caught.value.cause
    assert "--python" in caught.value.remedy


def test_another_version_behind_the_name_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program's name is no proof of its version."""
    (tmp_path / "python3.99").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VllmEnvError) as caught:
        find_interpreter("3.99")
    assert "is cpython 3." in caught.value.cause


def test_the_installed_interpreter_is_complete_and_its_own(bare_prefix: Path) -> None:
    """It starts where it was installed, finds its own library, and has the modules that packages import."""
    code = "import sys, ssl, sqlite3, ctypes, lzma, bz2, zlib, hashlib; print(sys.prefix, sys.base_prefix)"
    assert _run(bare_prefix, code) == f"{bare_prefix} {bare_prefix}"
    section = read_dynamic_section(bare_prefix / "bin" / f"python{PYTHON}")
    assert section is not None
    if any(name.startswith("libpython") for name in section.needed):  # Debian's program has it inside
        mapped = _run(bare_prefix, "print([l.split()[-1] for l in open('/proc/self/maps') if 'libpython' in l][0])")
        assert Path(mapped).parent == bare_prefix / "lib"


def test_libraries_look_into_the_environment_alone(bare_prefix: Path) -> None:
    """No library path leads back to where the interpreter came from."""
    origin = str(find_interpreter(PYTHON).prefix)
    files = [bare_prefix / f"bin/python{PYTHON}", *(bare_prefix / "lib").glob("lib*.so*")]
    files += (bare_prefix / f"lib/python{PYTHON}/lib-dynload").glob("*.so")
    for file in files:
        needs = read_dynamic_section(file)
        assert needs is not None
        dynamic = subprocess.check_output(["readelf", "-d", file], text=True)
        paths = [line for line in dynamic.splitlines() if "RUNPATH" in line or "RPATH" in line]
        assert not any(origin in line for line in paths), file


def test_text_files_do_not_name_where_it_came_from(bare_prefix: Path) -> None:
    """_sysconfigdata and the like hold a neutral folder: torch and setuptools read them at run time."""
    origin = str(find_interpreter(PYTHON).prefix)
    if origin in {"/usr", "/usr/local"}:
        pytest.skip("a system interpreter's folder is neutral enough")
    data = next(bare_prefix.glob(f"lib/python{PYTHON}/_sysconfigdata*.py")).read_text()
    assert origin not in data
    assert NEUTRAL_PREFIX in data


def test_what_no_server_needs_is_left_out(bare_prefix: Path) -> None:
    """Tests, Tk and the installer of pip stay behind; the headers, which torch compiles against, come along."""
    stdlib = bare_prefix / f"lib/python{PYTHON}"
    assert not any((stdlib / name).exists() for name in ("test", "tkinter", "idlelib", "ensurepip"))
    assert (bare_prefix / f"include/python{PYTHON}/Python.h").is_file()


def test_equal_interpreters_give_equal_packages(channel, tmp_path: Path) -> None:
    """The lock names the package by digest, so another build on the same machine must give the same one."""
    made = make_package(find_interpreter(PYTHON), tmp_path / "out", tmp_path)
    first = channel.root / "conda/channel/linux-64" / made.name
    assert made.read_bytes() == first.read_bytes()


@pytest.fixture(scope="session")
def debian() -> Interpreter:
    """Debian's or Ubuntu's own interpreter of this machine; skips where there is none that can be packed."""
    reasons = []
    for program in sorted(Path("/usr/bin").glob("python3.[0-9]*[0-9]")):
        found = find._probe(program, program.name.removeprefix("python"))
        if isinstance(found, Interpreter) and found.is_debian:
            return found
        reasons.append(f"{program} {found}")
    pytest.skip(f"no interpreter of Debian or Ubuntu that can be packed: {'; '.join(reasons) or 'none in /usr/bin'}")


@pytest.fixture
def small_debian(debian: Interpreter, tmp_path: Path) -> Interpreter:
    """The same with the modules alone that are asked for when it is packed."""
    stdlib = tmp_path / "stdlib" / debian.stdlib.name
    needed = ("ctypes", "collections", "encodings", "importlib", "json", "re", "sqlite3", "distutils", "sysconfig")
    extensions = ("_ctypes.", "_json.", "_sqlite3.", "_ssl.", "zlib.", "_sysconfigdata")

    def others(folder: str, names: list[str]) -> list[str]:
        if Path(folder).name == "lib-dynload":
            return [name for name in names if not name.startswith(extensions)]
        folders = [name for name in names if Path(folder, name).is_dir()]
        return [name for name in folders if name not in (*needed, "lib-dynload")] if Path(folder) == debian.stdlib else []

    shutil.copytree(debian.stdlib, stdlib, symlinks=True, ignore=others)
    return dataclasses.replace(debian, stdlib=stdlib)


def _unpack(package: Path, folder: Path) -> Path:
    with zipfile.ZipFile(package) as archive:
        data = archive.read(next(n for n in archive.namelist() if n.startswith("pkg-")))
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        tar.extraction_filter = lambda member, _: member  # an argument since Python 3.11.4 only
        tar.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def debian_package(debian: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of Debian's interpreter."""
    folder = tmp_path_factory.mktemp("debian")
    return make_package(debian, folder / "out", folder)


@pytest.fixture(scope="session")
def debian_prefix(debian_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Debian's interpreter, and nothing left where it was made; read it, do not change it."""
    shutil.rmtree(debian_package.parent.parent / "python")
    return _unpack(debian_package, tmp_path_factory.mktemp("debian") / "prefix")


@pytest.fixture
def own_prefix(debian_prefix: Path, tmp_path: Path) -> Path:
    """A folder of a test's own with Debian's interpreter."""
    return shutil.copytree(debian_prefix, tmp_path / "prefix", symlinks=True)


@pytest.fixture
def hello_wheel(tmp_path: Path) -> Path:
    """A wheel of one module, with a .pth file that counts how often it is read."""
    wheel = tmp_path / "hello-1-py3-none-any.whl"
    files = {
        "hello.py": "",
        "hello.pth": "import sys; sys.hello = getattr(sys, 'hello', 0) + 1\n",
        "hello-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: hello\nVersion: 1\n",
        "hello-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("hello-1.dist-info/RECORD", "".join(f"{n},,\n" for n in [*files, "hello-1.dist-info/RECORD"]))
    return wheel


def _install(prefix: Path, wheel: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    options: list[str | Path] = ["--quiet", "--offline", "--no-deps", "--no-config", "--python", prefix / "bin/python"]
    subprocess.run([uv, "pip", "install", *options, wheel], check=True, env=os.environ | {"DEB_PYTHON_INSTALL_LAYOUT": "deb"})


def _packages(prefix: Path) -> Path:
    (stdlib,) = (prefix / "lib").glob("python3.*")
    return stdlib / "site-packages"


def test_debians_interpreter_is_taken_where_there_is_no_other(
    debian: Interpreter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a bare container: the packages python3 and libpython3.X, no pyenv and nothing else on PATH."""
    monkeypatch.setattr(sys, "executable", str(debian.executable))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_interpreter(debian.minor)
    assert found.is_debian
    assert (found.version, found.library) == (debian.version, debian.library)


def test_any_other_interpreter_is_preferred_to_debians(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another one needs no change, and a machine that has both gives the package that it has always given."""
    made = {}
    for name, text in (("debian", "dist-packages"), ("pyenv", "site-packages")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "site.py").write_text(text)
        (tmp_path / name / "python3.99").touch(0o755)
        made[tmp_path / name / "python3.99"] = Interpreter("3.99.1", tmp_path, tmp_path, tmp_path / name, tmp_path)
    monkeypatch.setattr(find, "_candidates", lambda python: list(made))
    monkeypatch.setattr(find, "_probe", lambda candidate, python: made[candidate])
    assert find_interpreter("3.99").stdlib == tmp_path / "pyenv"


def test_debians_interpreter_without_its_library_is_refused_with_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A bare container has python3 and no libpython: the package of that very version is what to install."""
    (tmp_path / "_distutils_system_mod.py").touch()
    facts: dict[str, object] = {"version": "3.99.2", "prefix": "/usr", "executable": "/usr/bin/python3.99"}
    facts |= {"implementation": "cpython", "stdlib": str(tmp_path), "library": "libpython3.99.so.1.0", "shared": True}
    facts |= {"folders": ["/usr/lib/x86_64-linux-gnu"], "multiarch": "x86_64-linux-gnu"}
    (tmp_path / "python3.99").write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(facts)}\nEND\n")
    (tmp_path / "python3.99").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(VllmEnvError, match=r"no Python 3\.99 to pack") as caught:
        find_interpreter("3.99")
    assert "has no shared libpython: apt-get install libpython3.99" in caught.value.cause
    assert caught.value.remedy.startswith("Run apt-get install libpython3.99, ")


def test_debians_looks_for_packages_in_site_packages_alone(debian_prefix: Path) -> None:
    """sys.path is what CPython's would be; Debian's folders are neither on it nor named, wherever the program is started."""
    code = "import json, site, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.path, site.getsitepackages()]))"
    output = subprocess.check_output([debian_prefix / "bin/python", "-c", code], cwd="/", env={}, text=True)
    prefix, base, path, packages = json.loads(output)
    assert prefix == base == str(debian_prefix)
    assert packages == [str(_packages(debian_prefix))]
    lib = _packages(debian_prefix).parent
    archive = debian_prefix / "lib" / f"{lib.name.replace('.', '')}.zip"
    assert path == ["", str(archive), str(lib), str(lib / "lib-dynload"), str(_packages(debian_prefix))]


def test_debians_installs_into_site_packages_and_can_be_moved(own_prefix: Path, hello_wheel: Path) -> None:
    """uv asks sysconfig where to install; a variable of Debian's that means dist-packages changes nothing.

    The .pth file is read once by the program and once by a child that multiprocessing spawns, also in another folder.
    """
    _install(own_prefix, hello_wheel)
    assert (_packages(own_prefix) / "hello.py").is_file()
    moved = own_prefix.rename(own_prefix.with_name("moved"))
    script = moved / "spawn.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def facts(_): import hello; return sys.hello, hello.__file__, sys.prefix\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print([facts(0)] == pool.map(facts, [0]), facts(0))\n"
    )
    output = subprocess.check_output([moved / "bin/python", script], text=True, env={}).strip()
    assert output == f"True {(1, str(_packages(moved) / 'hello.py'), str(moved))}"


def test_debians_schemes_and_distutils_agree_with_site(debian: Interpreter, debian_prefix: Path) -> None:
    """What asks distutils, as older build tools do, gets the folder that is looked into."""
    code = "import sysconfig; print(sysconfig.get_default_scheme(), sysconfig.get_path('platlib'))"
    assert _run(debian_prefix, code) == f"posix_prefix {_packages(debian_prefix)}"
    if not (debian.stdlib / "distutils/sysconfig.py").is_file():
        pytest.skip("the rest of distutils is not installed (python3-distutils), or is no part of this Python")
    code = "import warnings; warnings.simplefilter('ignore'); from distutils.sysconfig import get_python_lib as lib; print(lib())"
    assert _run(debian_prefix, code) == str(_packages(debian_prefix))


def test_debians_finds_itself_when_it_is_embedded(own_prefix: Path, hello_wheel: Path, tmp_path: Path) -> None:
    """As in Triton's stub: no program name is set, and the launcher gives PATH, LD_LIBRARY_PATH and VIRTUAL_ENV."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a program that embeds Python")
    _install(own_prefix, hello_wheel)
    (library,) = (own_prefix / "lib").glob("libpython3.*.so.1.0")
    source, program = tmp_path / "stub.c", tmp_path / "stub"
    source.write_text(
        "void Py_Initialize(void); int PyRun_SimpleStringFlags(const char *, void *);"
        "int Py_FinalizeEx(void);"
        "int main(int n, char **a) { Py_Initialize(); n = PyRun_SimpleStringFlags(a[1], 0); return Py_FinalizeEx() || n; }"
    )
    subprocess.run([compiler, source, library, "-o", program], check=True)
    code = (
        "import sys, encodings, ssl, sqlite3, ctypes, subprocess, hello\n"
        "show = 'import sys, hello; print(sys.hello, sys.prefix, hello.__file__)'\n"
        "exec(show); sys.stdout.flush(); subprocess.run([sys.executable, '-c', show], check=True)\n"
        "print([line.split()[-1] for line in open('/proc/self/maps') if 'libpython' in line][0])\n"
    )
    environment = {"PATH": f"{own_prefix}/bin:/usr/bin:/bin", "LD_LIBRARY_PATH": f"{own_prefix}/lib"}
    output = subprocess.check_output([program, code], text=True, env=environment | {"VIRTUAL_ENV": str(own_prefix)})
    line = f"1 {own_prefix} {_packages(own_prefix) / 'hello.py'}"
    assert output.splitlines() == [line, line, str(library)]


def test_debians_package_holds_no_link_out_of_it_and_no_place_of_the_machine(debian_prefix: Path) -> None:
    """sitecustomize leads to /etc there; _sysconfigdata named /usr. Time zones and tools are the machine's and stay."""
    links = [p for p in debian_prefix.rglob("*") if p.is_symlink()]
    assert links
    assert all(p.resolve(strict=True).is_relative_to(debian_prefix) for p in links)
    assert not list(debian_prefix.rglob("sitecustomize.py"))
    names = ("prefix", "LIBDIR", "BINDIR", "INCLUDEPY", "LIBPL", "TZPATH")
    code = f"import json, sysconfig; print(json.dumps([sysconfig.get_config_var(n) for n in {names}]))"
    *places, zones = json.loads(_run(debian_prefix, code))
    lib = f"{NEUTRAL_PREFIX}/lib"
    assert places[:3] == [NEUTRAL_PREFIX, lib, f"{NEUTRAL_PREFIX}/bin"]
    assert all(place.startswith(NEUTRAL_PREFIX + "/") for place in places[1:])
    assert zones.startswith("/usr/share/zoneinfo:/usr/lib/zoneinfo")


def test_debians_program_brings_the_libraries_that_it_is_linked_to(debian_prefix: Path) -> None:
    """zlib and expat are in the program and in libpython there, not in modules; every library is found in the prefix."""
    files = [*(debian_prefix / "bin").glob("python3.*"), *(debian_prefix / "lib").glob("libpython3.*.so.1.0")]
    for file in files:
        needs = read_dynamic_section(file)
        assert needs is not None
        for name in needs.needed:
            assert package._SYSTEM_LIBRARIES.match(name) or (debian_prefix / "lib" / name).is_file(), (file, name)
    assert (debian_prefix / "lib/libexpat.so.1").is_file()


def test_debians_package_is_the_same_each_time(debian: Interpreter, debian_package: Path, tmp_path: Path) -> None:
    """The interpreter was started in its folder in between, and no bytecode of that is in the package."""
    assert make_package(debian, tmp_path / "out", tmp_path).read_bytes() == debian_package.read_bytes()
    assert not list((tmp_path / "python").rglob("__pycache__"))


def test_headers_are_packed_where_they_are_installed(
    debian: Interpreter, small_debian: Interpreter, debian_prefix: Path, tmp_path: Path
) -> None:
    """They come with libpython3.X-dev; a machine without them packs an interpreter all the same, and it can be asked."""
    copies = list(debian_prefix.glob("include/python3.*/Python.h"))
    assert len(copies) == bool(debian.headers)
    if copies:
        assert "SIZEOF_LONG " in copies[0].with_name("pyconfig.h").read_text()
    bare = dataclasses.replace(small_debian, prefix=tmp_path)
    assert bare.headers is None
    prefix = _unpack(make_package(bare, tmp_path / "out", tmp_path), tmp_path / "bare")
    assert not (prefix / "include").exists()


def test_an_interpreter_that_looks_elsewhere_is_not_packed(
    small_debian: Interpreter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A change of Debian's that is not undone is seen when the packed interpreter is started, and nothing is written."""
    monkeypatch.setattr(debian_stdlib, "restore_site_packages", lambda stdlib: None)
    with pytest.raises(VllmEnvError, match=r"getsitepackages\(\) = .*dist-packages.* should have .*site-packages"):
        make_package(small_debian, tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_link_out_of_a_tree_becomes_its_file_or_goes(tmp_path: Path) -> None:
    """Debian's headers may hold a link to a folder of another package, such as numpy's."""
    source, outside = tmp_path / "source", tmp_path / "outside"
    source.mkdir()
    outside.mkdir()
    (outside / "file.py").write_text("text")
    (source / "a.py").write_text("own")
    (source / "inside.py").symlink_to("a.py")
    (source / "file.py").symlink_to(outside / "file.py")
    (source / "absolute.py").symlink_to(source / "a.py")
    (source / "numpy").symlink_to(outside)
    (source / "broken.py").symlink_to("nothing.py")
    package._copy_tree(source, tmp_path / "copy")
    copy = {p.name: p.is_symlink() for p in (tmp_path / "copy").iterdir()}
    assert copy == {"a.py": False, "inside.py": True, "file.py": False, "absolute.py": False}
    assert (tmp_path / "copy/file.py").read_text() == "text"
