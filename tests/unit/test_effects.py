"""What each room does to the world: processes, files, sockets, threads, patches of vLLM.

Read from the sources, next to import-linter's floors: who looks for what a change may touch finds it here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL, PACKAGER = ROOT / "model_repository/vllm/1/triton_vllm", ROOT / "env/vllm_env"
PROCESS, FILE, SOCKET, THREAD = "starts processes", "writes files", "opens sockets", "starts threads"
PATCH, STATE = "patches vLLM or torch", "changes this process"
ROOMS = {
    MODEL: {
        "base": {FILE, THREAD},
        "constraints": {PROCESS, SOCKET, THREAD},
        "engine": {THREAD},
        "instances": {FILE, THREAD},
        "lora": {FILE, THREAD},
        "metrics": {FILE, THREAD},
        "openai": {SOCKET},
        "reply": {THREAD},
        "startup": {PROCESS, FILE, SOCKET, THREAD, STATE},
        "vllm_api": {PATCH},  # and vLLM starts its processes where it is called from here
    },
    PACKAGER: {
        "top": {FILE},
        "base": {PROCESS, FILE, SOCKET, THREAD, STATE},  # `process` and `network` are what the others start and reach with
        "cli": {FILE, SOCKET},
        "export": {FILE},
        "inside": {PROCESS, FILE, THREAD, STATE, PATCH},
        "interpreter": {FILE},
        "layout": {FILE, THREAD},
        "lock": {FILE},
        "prefix": {FILE},
        "publish": {FILE},
        "serve": {FILE, SOCKET},
        "triton": {FILE},
        "verify": {FILE, THREAD},
    },
}
"""A room that is not named does nothing of all this."""
CALLS = {
    **dict.fromkeys(("subprocess.run", "subprocess.Popen", "subprocess.check_output", "os.fork", "os.posix_spawn"), PROCESS),
    **dict.fromkeys(("asyncio.create_subprocess_exec",), PROCESS),
    **dict.fromkeys(("os.link", "os.symlink", "os.rename", "os.replace", "os.mkdir", "os.unlink", "os.posix_fallocate"), FILE),
    **dict.fromkeys(("socket.socket", "socket.socketpair", "socket.create_connection", "urllib.request.urlopen"), SOCKET),
    **dict.fromkeys(("threading.Thread", "supervised.thread", "asyncio.to_thread"), THREAD),
    "setattr": PATCH,
}
MODULES = {"shutil": FILE, "tempfile": FILE, "http.client": SOCKET, "grpc": SOCKET}
LAST = {"ThreadPoolExecutor": THREAD, "run_in_executor": THREAD, "Process": PROCESS}
METHODS = {"write_text", "write_bytes", "mkdir", "touch", "unlink", "rmdir", "rename", "symlink_to", "hardlink_to"}
WRITING = set("wax+")
OWN = {"params", "wanted"}
"""Names of objects that a caller has made for this one purpose."""


def effects(source: str) -> set[str]:
    """Return what a module's calls and assignments do."""
    tree = ast.parse(source)
    imported = {name for node in ast.walk(tree) for name in names_bound(node)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= of_call(node)
        elif isinstance(node, ast.Assign):
            found |= {effect for target in node.targets for effect in of_assignment(target, imported)}
    return found


def of_assignment(target: ast.expr, imported: set[str]) -> set[str]:
    """Return what an assignment to a place does; `imported` are the names that are modules or classes of others."""
    text = ast.unparse(target)
    if text.startswith(("os.environ[", "sys.path", "sys.executable")):
        return {STATE}
    owners = [node.value for node in ast.walk(target) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    foreign = any(isinstance(owner, ast.Name) and owner.id in imported for owner in owners)
    return {PATCH} if foreign or text.startswith("sys.modules[") else set()


def names_bound(node: ast.AST) -> set[str]:
    """Return the names that an import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return set()


def of_call(node: ast.Call) -> set[str]:
    """Return what one call does."""
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    found = {effect for module, effect in MODULES.items() if name.startswith(f"{module}.")}
    if name in CALLS and not (name == "setattr" and ast.unparse(node.args[0]) in OWN):
        found.add(CALLS[name])
    if last in LAST and not name.startswith("psutil."):  # whose Process is one that runs
        found.add(LAST[last])
    if last in METHODS and name != last:
        found.add(FILE)
    if last == "open" and (set(mode_of(node)) & WRITING or "O_CREAT" in ast.unparse(node)):
        found.add(FILE)
    return found


def mode_of(node: ast.Call) -> str:
    """Return the mode of `open(path, mode)` or `path.open(mode)`; nothing where it is not said."""
    given = [word.value for word in node.keywords if word.arg == "mode"]
    given += node.args[1:2] if isinstance(node.func, ast.Name) else node.args[:1]
    return str(given[0].value) if given and isinstance(given[0], ast.Constant) else ""


def rooms() -> list[tuple[Path, str]]:
    """Return the rooms of both halves; the modules at the top are a room of their own."""
    return [(half, room) for half in ROOMS for room in ("top", *sorted(p.parent.name for p in half.glob("*/__init__.py")))]


@pytest.mark.parametrize(("half", "room"), rooms(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_room_does_what_the_table_says(half: Path, room: str) -> None:
    """No more, and no less: a line that is not true is no help."""
    folder = half if room == "top" else half / room
    found = {effect for file in folder.glob("*.py") for effect in effects(file.read_text("utf-8"))}
    assert found == ROOMS[half].get(room, set())
