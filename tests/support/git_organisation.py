"""A git organisation on this machine with ``python_backend`` and ``common``: the same branch, target and options as Triton's.

Its stub is small, but it is compiled, embeds Python through pybind11 and wants arguments, as the real one does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LISTS = """\
cmake_minimum_required(VERSION 3.4)  # as old as CMake 4 refuses without CMAKE_POLICY_VERSION_MINIMUM
project(tritonpythonbackend LANGUAGES C CXX)
set(CMAKE_CXX_STANDARD 17)
add_compile_options(-O0)  # it runs once and is compiled often
option(TRITON_ENABLE_GPU "Enable GPU support in backend" ON)
foreach(part BACKEND COMMON CORE)
  set(TRITON_${part}_REPO_TAG "main" CACHE STRING "Tag of its repository")
  message(STATUS "tag of ${part}: ${TRITON_${part}_REPO_TAG}")
endforeach()
message(STATUS "organisation: ${TRITON_REPO_ORGANIZATION}")
message(STATUS "gpu: ${TRITON_ENABLE_GPU}")
include(FetchContent)
# the address is written in here, as it is in the releases up to 25.07
FetchContent_Declare(repo-common
  GIT_REPOSITORY https://github.com/triton-inference-server/common.git GIT_TAG ${TRITON_COMMON_REPO_TAG})
FetchContent_MakeAvailable(repo-common)
find_package(pybind11 CONFIG REQUIRED PATHS ${CMAKE_CURRENT_SOURCE_DIR}/pybind11 NO_DEFAULT_PATH)
add_executable(triton-python-backend-stub src/pb_stub.cc)
set_property(TARGET triton-python-backend-stub PROPERTY OUTPUT_NAME triton_python_backend_stub)
target_link_libraries(triton-python-backend-stub PRIVATE common pybind11::embed)
"""
STUB = """\
#include <pybind11/embed.h>
#include <common.h>
#include <iostream>
int main(int argc, char** argv)
{
  if (argc < 9) {
    std::cerr << "Expected 9 arguments, found " << argc << " arguments." << std::endl;
    return 1;
  }
  pybind11::scoped_interpreter interpreter;
  pybind11::module_ sys = pybind11::module_::import("sys");
  std::cout << COMMON << " " << std::string(pybind11::str(sys.attr("version"))) << std::endl;
  std::cout << std::string(pybind11::str(sys.attr("prefix"))) << std::endl;
  pybind11::object stream = pybind11::module_::import("io").attr("open")("/dev/null");
  std::cout << std::string(pybind11::str(stream.attr("encoding"))) << std::endl;
  return 0;
}
"""
_COMMON_LISTS = """\
add_library(common INTERFACE)
target_include_directories(common INTERFACE ${CMAKE_CURRENT_SOURCE_DIR})
"""
_WHO = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")


def make_organisation(
    folder: Path, pybind11: Path | None, *, release: str = "24.10", stub: str = STUB, lists: str = LISTS
) -> str:
    """Make the bare repositories ``python_backend.git`` and ``common.git`` with a branch of a release; return their place.

    Args:
        folder: what they are made in.
        pybind11: the installed package pybind11, with its headers and CMake files; None if nothing is to be compiled.
        release: the release that gets a branch, such as ``24.10``.
        stub: the stub's source.
        lists: python_backend's CMakeLists.txt.
    """
    backend = {"CMakeLists.txt": lists, "src/pb_stub.cc": stub}
    _make_repository(folder / "python_backend.git", backend, f"r{release}", pybind11)
    common = {"CMakeLists.txt": _COMMON_LISTS, "common.h": '#define COMMON "common"\n'}
    _make_repository(folder / "common.git", common, f"r{release}")
    return str(folder)


def _make_repository(bare: Path, files: dict[str, str], branch: str, extra: Path | None = None) -> None:
    work = bare.with_suffix(".work")
    _git("init", "--quiet", "--initial-branch", branch, str(work))
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text, "utf-8")
    if extra:
        shutil.copytree(extra, work / "pybind11", ignore=shutil.ignore_patterns("__pycache__"))
    _git("-C", str(work), "add", "--all")
    _git("-C", str(work), *_WHO, "commit", "--quiet", "--message", "a release")
    _git("clone", "--quiet", "--bare", str(work), str(bare))


def _git(*arguments: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", *arguments], check=True, env=environment, capture_output=True)
