"""Two distributions that own one file: found in what uv makes of real wheels."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_env.base.errors import VllmEnvError
from vllm_env.prefix.file_owners import Clash, Distribution, Owned, check_clashes, find_clashes, read_installed

CORE, SHIM = Distribution("cuda-bindings", "13.5.0"), Distribution("cuda-python", "12.6.2.post1")


def _wheel(folder: Path, stem: str, files: dict[str, str], *requires: str) -> Path:
    """A wheel of the given files, with a true RECORD."""
    name, version = stem.split("-")
    info = f"{stem}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    content = {
        **files,
        f"{info}/METADATA": "\n".join(lines) + "\n\nRequires-Dist: only-said-in-the-description\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{info}/RECORD,,"]
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**content, f"{info}/RECORD": "\n".join(rows) + "\n"}.items():
            archive.writestr(path, text)
    return wheel


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """The real case in small: cuda-python 12 has a module of cuda-bindings 13, and a namespace file in common with it."""
    own = {f"cuda/bindings/part{n}.py": f"{n}" for n in range(30)}
    shared = {"cuda/__init__.py": "", "cuda/bindings/runtime.py": "new"}
    old = {**shared, "cuda/bindings/runtime.py": "old"}
    return [
        _wheel(tmp_path, "cuda_bindings-13.5.0", shared | own),
        _wheel(tmp_path, "cuda_python-12.6.2.post1", old),
        _wheel(
            tmp_path,
            "flashinfer_python-0.7.0",
            {"flashinfer.py": ""},
            "cuda-python>=12.0",
            "cuda-bindings; extra == 'x'",
        ),
    ]


def _install(wheels: list[Path], target: Path) -> Path:
    """Install wheels one after the other by the packager's own uv."""
    uv = Path(sys.executable).parent / "uv"
    for wheel in wheels:
        options: list[str | Path] = ["--quiet", "--no-deps", "--no-config", "--offline", "--no-index", "--target", target]
        subprocess.run([uv, "pip", "install", *options, wheel], check=True)
    return target


def test_metadata_is_read_up_to_its_description(pair: list[Path], tmp_path: Path) -> None:
    """A description may quote metadata; what it says is required by nobody."""
    (owned,) = read_installed(_install(pair[2:], tmp_path / "site-packages")).values()
    assert owned.requires == ("cuda-python>=12.0", "cuda-bindings; extra == 'x'")


def test_a_file_without_a_digest_cannot_be_compared(tmp_path: Path) -> None:
    """Bytecode that pip lists in RECORD has none, and is another file in each distribution's eyes."""
    for name, digest in (("one", ""), ("two", "sha256=abc")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"common.pyc,{digest},\n{name}.py,sha256=x,1\n")
    owned = read_installed(tmp_path)
    assert set(owned) == {Distribution("one", "1.0"), Distribution("two", "1.0")}
    assert find_clashes(owned) == ()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_what_uv_has_just_installed_tells_which_files_clash(pair: list[Path], tmp_path: Path, order: tuple[int, ...]) -> None:
    """Whoever was last: the module with two contents is named once; the namespace file, equal in both, is fine."""
    packages = _install([pair[n] for n in order], tmp_path / "site-packages")
    assert find_clashes(read_installed(packages)) == (Clash(CORE, SHIM, "cuda/bindings/runtime.py"),)


def test_the_message_names_both_who_asks_and_the_constraint(pair: list[Path], tmp_path: Path) -> None:
    """Two generations of one family: the older one is to be of the newer's; an extra that nobody asked for is not told."""
    owned = read_installed(_install(pair, tmp_path / "site-packages"))
    with pytest.raises(VllmEnvError) as caught:
        check_clashes(find_clashes(owned), owned)
    assert caught.value.what.startswith("cuda-bindings 13.5.0 and cuda-python 12.6.2.post1 own 1 file with")
    assert "cuda/bindings/runtime.py" in caught.value.what
    assert "cuda-python is required by flashinfer-python (>=12.0)." in caught.value.cause
    assert "cuda-bindings is required" not in caught.value.cause
    assert "--with 'cuda-python>=13'" in caught.value.remedy


def test_two_builds_of_one_project_are_told_apart_from_two_generations(tmp_path: Path) -> None:
    """They share most of their files: no version of either helps, one has to go."""
    wheels = [
        _wheel(tmp_path, f"{name}-4.{n}", {f"cv2/part{i}.py": name for i in range(9)})
        for n, name in enumerate(("opencv_python", "opencv_python_headless"))
    ]
    owned = read_installed(_install(wheels, tmp_path / "site-packages"))
    with pytest.raises(VllmEnvError, match="own 9 files") as caught:
        check_clashes(find_clashes(owned), owned)
    assert 'drop = ["opencv-python-headless"]' in caught.value.remedy


def test_packages_that_have_nothing_in_common_get_a_general_remedy(tmp_path: Path) -> None:
    """A lower bound is only proposed where the names tell of one family; a major version alone tells nothing."""
    files = {f"{n}.py": "" for n in range(9)}
    wheels = [
        _wheel(tmp_path, "alpha-1.0", {"common.py": "a", **{f"alpha/{k}": v for k, v in files.items()}}),
        _wheel(tmp_path, "beta-2.0", {"common.py": "b", **{f"beta/{k}": v for k, v in files.items()}}),
    ]
    owned = read_installed(_install(wheels, tmp_path / "site-packages"))
    with pytest.raises(VllmEnvError) as caught:
        check_clashes(find_clashes(owned), owned)
    assert "alpha!=1.0" in caught.value.remedy
    assert ">=2" not in caught.value.remedy


def test_what_nothing_imports_may_clash(tmp_path: Path) -> None:
    """Seen: flashinfer-python and torch-c-dlpack-ext both leave their build_backend.py; it is found, and not refused."""
    wheels = [
        _wheel(tmp_path, f"{name}-1.0", {"build_backend.py": name, "tests/__init__.py": name, f"{name}/m.py": ""})
        for name in ("one", "two")
    ]
    owned = read_installed(_install(wheels, tmp_path / "site-packages"))
    clashes = find_clashes(owned)
    assert [c.path for c in clashes] == ["build_backend.py", "tests/__init__.py"]
    check_clashes(clashes, owned)
    deeper = tuple(Clash(c.one, c.other, f"package/{c.path}") for c in clashes)
    with pytest.raises(VllmEnvError, match="own 2 files"):
        check_clashes(deeper, owned)


def test_a_small_package_inside_a_large_one_is_no_second_build_of_it() -> None:
    """All files of the old package are in the new one, which has many more: a newer version helps, not to drop it."""
    small = {f"cuda/part{n}.py": "old" for n in range(4)}
    owned = {CORE: Owned({f"cuda/part{n}.py": "new" for n in range(40)}), SHIM: Owned(small)}
    with pytest.raises(VllmEnvError) as caught:
        check_clashes(find_clashes(owned), owned)
    assert "cuda-python>=13" in caught.value.remedy


def test_three_owners_are_three_pairs(tmp_path: Path) -> None:
    """Each two are named; the message explains one and counts the others."""
    wheels = [_wheel(tmp_path, f"p{n}-1.0", {"m.py": f"{n}", **{f"p{n}/{i}.py": "" for i in range(9)}}) for n in range(3)]
    owned = read_installed(_install(wheels, tmp_path / "site-packages"))
    assert len(find_clashes(owned)) == 3
    with pytest.raises(VllmEnvError, match="2 more pairs"):
        check_clashes(find_clashes(owned), owned)
