"""The note of a slow run says what was run, when, and how it has ended."""

from __future__ import annotations

import datetime
import json
import subprocess

from support import slow_run


def test_a_note_has_the_commit_and_the_counts(tmp_path):
    """Of the working tree, too, whether it was changed."""
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / ".gitignore").write_text("/.tools/\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=a"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    stats = {"passed": [1, 2], "failed": [3], "deselected": [4]}
    slow_run.note(tmp_path, slow_run.read_sources(tmp_path), ("--slow", "tests/e2e"), stats, 1)
    said = json.loads((tmp_path / ".tools" / "slow-run.json").read_text())
    assert (said["commit"], said["changed"], said["arguments"]) == (head, False, ["--slow", "tests/e2e"])
    assert (said["passed"], said["failed"], said["skipped"], said["exit_status"]) == (2, 1, 0, 1)
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(said["date"])
    assert age >= datetime.timedelta()
    (tmp_path / "new").touch()
    assert slow_run.read_sources(tmp_path) == slow_run.Sources(head, changed=True)


def test_a_folder_that_is_no_repository_has_a_note_without_commit(tmp_path):
    """Such as an unpacked archive of the sources."""
    assert slow_run.read_sources(tmp_path) == slow_run.Sources("", changed=False)
