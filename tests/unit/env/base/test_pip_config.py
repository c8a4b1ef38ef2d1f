"""pip's configuration as uv's options."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest

from vllm_env.base.network import PipConfig, parse_pip_config, read_pip_config

if TYPE_CHECKING:
    from pathlib import Path


def test_values_of_files_and_variables_become_options() -> None:
    """Every source that pip has, uv gets."""
    config = parse_pip_config(
        "global.index-url='https://index.test/simple'\n"
        "global.extra-index-url='https://a.test/simple https://b.test/simple'\n"
        "global.find-links='/wheels\\n/more'\n"
        "global.trusted-host='a.test'\n"
        "global.cert='/ca.pem'\n"
        "global.timeout='60'\n"
    )
    assert config == PipConfig(
        "https://index.test/simple",
        ("https://a.test/simple", "https://b.test/simple"),
        ("/wheels", "/more"),
        ("a.test",),
        "/ca.pem",
    )
    options = config.uv_arguments()
    for pair in (
        ("--default-index", "https://index.test/simple"),
        ("--index", "https://b.test/simple"),
        ("--find-links", "/more"),
        ("--allow-insecure-host", "a.test"),
        ("--index-strategy", "unsafe-best-match"),
    ):
        assert pair in itertools.pairwise(options)


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("1", True), ("no", False), ("0", False)])
def test_no_index_is_understood(text: str, expected: bool) -> None:
    """pip's boolean words decide whether uv may use an index at all."""
    config = parse_pip_config(f":env:.no-index={text!r}\n")
    assert config.no_index is expected
    assert ("--no-index" in config.uv_arguments()) is expected


def test_what_the_real_pip_prints_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form is that of the pip that is installed: a file and variables, quoted as pip quotes them."""
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = https://index.test/it's\nfind-links =\n    /one\n    /two\n")
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://extra.test/simple")
    config = read_pip_config()
    assert config.index_url == "https://index.test/it's"
    assert config.find_links[-2:] == ("/one", "/two")
    assert config.extra_index_urls == ("https://extra.test/simple",)


def test_certificates_do_not_replace_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's SSL_CERT_FILE stays."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert PipConfig(cert="/ca.pem").uv_environment() == {"SSL_CERT_FILE": "/ca.pem"}
    monkeypatch.setenv("SSL_CERT_FILE", "/mine.pem")
    assert PipConfig(cert="/ca.pem").uv_environment() == {}


def test_files_of_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one in pip's place; without an answer nothing would be configured."""
    (tmp_path / "pip.py").write_text("raise SystemExit('the pip of the current folder')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    assert read_pip_config().index_url == "https://mirror.example/simple"


def test_the_sources_are_pips_and_uvs_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """uv's variables may have names; without any index there is pip's default one, unless indexes are forbidden."""
    for name in [n for n in os.environ if n.startswith("UV_")]:
        monkeypatch.delenv(name)
    extra = "https://a.test/simple"
    assert [s.place for s in PipConfig("", (extra, extra), ("/wheels",)).sources()] == ["", extra, "/wheels"]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://default.test/simple?a=b")
    monkeypatch.setenv("UV_INDEX", "company=https://u:p=w@company.test/simple https://b.test/simple")
    monkeypatch.setenv("UV_FIND_LINKS", "/more,/wheels")
    sources = PipConfig("", (extra,), ("/wheels",)).sources()
    assert [s.name for s in sources] == [
        "https://default.test/simple?a=b", extra, "https://****@company.test/simple", "https://b.test/simple", "/wheels", "/more",
    ]  # fmt: skip
    assert [s.is_index for s in sources] == [True] * 4 + [False] * 2
    assert [s.place for s in PipConfig(find_links=("/wheels",), no_index=True).sources()] == ["/wheels", "/more"]
    assert PipConfig("https://index.test/simple").sources()[0].name == "https://index.test/simple"
