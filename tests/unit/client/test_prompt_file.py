"""client/prompt_file.py: what is a prompt, and what a results file holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prompt_file import SEPARATOR, Answer, ClientError, Prompt, check_writable, load_prompts, number_prompts, store_results

if TYPE_CHECKING:
    from pathlib import Path


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    """Blank lines, a byte order mark and carriage returns are not; other separators and spaces belong to the prompt."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\r\n\n  two \n \t\nthree\x0cand\u2028more".encode())
    assert load_prompts(file) == ("one", "  two ", "three\x0cand\u2028more")


def test_ids_count_over_all_iterations() -> None:
    """From the offset on."""
    assert number_prompts(["a", "b"], iterations=2, offset=5) == [Prompt(5, "a"), Prompt(6, "b"), Prompt(7, "a"), Prompt(8, "b")]


def test_results_are_texts_with_a_separator(tmp_path: Path) -> None:
    """In the order given, as the official client writes them."""
    file = tmp_path / "results.txt"
    store_results(file, [Answer(Prompt(0, "a"), " é"), Answer(Prompt(1, "b"), "")])
    assert file.read_text("utf-8") == f" é\n{SEPARATOR}\n{SEPARATOR}"


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(tmp_path: Path) -> None:
    """Neither an empty file nor a shorter one."""
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    check_writable(there)
    check_writable(new)
    assert there.read_text() == "kept"
    assert not new.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With the option that names another."""
    for use in (check_writable, lambda path: store_results(path, [])):
        with pytest.raises(ClientError, match=r"cannot write the results to .*: Is a directory; .*--results-file"):
            use(tmp_path)
