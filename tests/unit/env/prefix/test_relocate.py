"""A prefix that keeps nothing of its build: scripts, RECORD files, times."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_env.prefix.relocate import make_relocatable

_RECORD = {
    "name": "python", "fn": "python-3.conda", "url": "file:///build/python-3.conda", "channel": "file:///build",
    "extracted_package_dir": "/build/python-3", "timestamp": 5, "link": {"source": "/build/python-3", "type": 1},
    "files": ["bin/tool", "share/man/gone.1"],
    "paths_data": {"paths": [{"_path": "bin/tool"}, {"_path": "share/man/gone.1"}]},
}  # fmt: skip


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A prefix with a script, a package and its RECORD."""
    prefix = tmp_path / "env"
    info = _info(prefix)
    info.mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta" / "history").write_text("# at some time\n")
    (prefix / "conda-meta" / "python-3.json").write_text(json.dumps(_RECORD))
    (prefix / "bin" / "python3.11").symlink_to(sys.executable)
    (prefix / "bin" / "python").symlink_to("python3.11")
    script = prefix / "bin" / "tool"
    script.write_text(f"#!{prefix}/bin/python\nimport sys\nprint('ran', *sys.argv[1:])\n")
    script.chmod(0o755)
    for name in ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "METADATA"):
        (info / name).write_text("x")
    rows = ["../../../bin/tool,sha256=old,1", "demo-1.dist-info/direct_url.json,sha256=x,1", "demo/gone.py,,"]
    rows += ["demo-1.dist-info/METADATA,sha256=kept,1", "demo-1.dist-info/RECORD,,", "demo/stripped.so,sha256=old,9"]
    (info.parent / "demo").mkdir()
    (info.parent / "demo/stripped.so").write_bytes(b"shorter")
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return prefix


def _info(prefix: Path) -> Path:
    return prefix / "lib/python3.11/site-packages/demo-1.dist-info"


def _relocate(prefix: Path) -> None:
    make_relocatable(prefix, _info(prefix).parent)


def test_the_trampoline_for_long_paths_is_rewritten_too(prefix: Path) -> None:
    """For a path beyond 127 bytes uv writes a shell line instead of a shebang; it names the folder just the same."""
    script = prefix / "bin/tool"
    script.write_text(f"#!/bin/sh\n'''exec' '{prefix}/bin/python' \"$0\" \"$@\"\n' '''\nprint('ran')\n")
    _relocate(prefix)
    assert str(prefix) not in script.read_text()
    assert subprocess.check_output([script], text=True) == "ran\n"


def test_a_script_of_another_interpreter_is_left_alone(prefix: Path) -> None:
    """Only what names this prefix is rewritten."""
    (prefix / "bin/other").write_text("#!/usr/bin/env python3\n")
    _relocate(prefix)
    assert (prefix / "bin/other").read_text() == "#!/usr/bin/env python3\n"


def test_record_has_the_digest_of_what_was_rewritten(prefix: Path) -> None:
    """pip check and importlib.metadata see true digests; what is gone is gone from RECORD; rows are sorted."""
    _relocate(prefix)
    rows = {row[0]: row[1:] for row in csv.reader((_info(prefix) / "RECORD").open())}
    data = (prefix / "bin/tool").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert rows["../../../bin/tool"] == [f"sha256={digest}", str(len(data))]
    assert rows["demo-1.dist-info/METADATA"] == ["sha256=kept", "1"]
    assert rows["demo/stripped.so"][1] == "7"
    assert rows["demo/stripped.so"][0] != "sha256=old"
    assert list(rows) == sorted(rows)
    assert "demo/gone.py" not in rows
    assert "demo-1.dist-info/direct_url.json" not in rows


@pytest.mark.parametrize(
    "row", ["demo/stripped.so,", "demo/stripped.so,sha256=x,many", "demo/stripped.so", "demo/stripped.so,,,extra"]
)
def test_a_row_that_is_not_usual_stays_as_it_is(prefix: Path, row: str) -> None:
    """pip installs such wheels; a build must not end with a traceback because of one."""
    (_info(prefix) / "RECORD").write_text(f"{row}\n\n")
    _relocate(prefix)
    assert row in (_info(prefix) / "RECORD").read_text().splitlines()


def test_what_tells_of_this_installation_is_removed(prefix: Path) -> None:
    """When, from where and by which tool was installed would differ between two builds of one lock."""
    _relocate(prefix)
    assert {f.name for f in _info(prefix).iterdir()} == {"METADATA", "RECORD"}
    assert (prefix / "conda-meta/history").read_text() == ""


def test_condas_record_tells_of_no_place_and_of_no_file_that_is_gone(prefix: Path) -> None:
    """conda-pack refuses a prefix without a recorded file, and what is left out by the rules is gone."""
    _relocate(prefix)
    text = (prefix / "conda-meta/python-3.json").read_text()
    record = json.loads(text)
    assert "/build" not in text
    assert "timestamp" not in record
    assert record["files"] == ["bin/tool"]
    data = (prefix / "bin/tool").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert record["paths_data"] == {"paths": [{"_path": "bin/tool", "size_in_bytes": len(data), "sha256_in_prefix": digest}]}


def test_a_hard_link_into_a_cache_is_not_written_through(prefix: Path, tmp_path: Path) -> None:
    """uv links files from its cache: rewriting one in place would damage the cache."""
    os.link(prefix / "bin/tool", tmp_path / "cached")
    before = (tmp_path / "cached").read_text()
    _relocate(prefix)
    assert (tmp_path / "cached").read_text() == before
