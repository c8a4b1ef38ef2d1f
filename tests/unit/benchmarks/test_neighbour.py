"""The neighbour and the attacks; the server that they are sent to is the real one only in a run."""

from __future__ import annotations

import asyncio
import importlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def neighbour() -> Any:
    """The program as a module."""
    return importlib.import_module("neighbour")


def test_clients_ask_for_the_same_tokens() -> None:
    """One client for each completion, over gRPC, and each list without its repetitions."""
    from harness.attacks import Attack

    attack = Attack(2, "x", {"n": 4, "max_tokens": 9, "allowed_token_ids": [5, 6, 5]}, requests=3, http=True, leave_after=7)
    clients = attack.as_clients()
    assert clients.requests == 12
    assert clients.parameters == {"n": 1, "max_tokens": 9, "allowed_token_ids": [5, 6]}
    assert (clients.http, clients.leave_after) == (False, 7)


def test_a_short_answer_ends_a_client_that_would_leave_later() -> None:
    """Triton keeps the connection of an answer that has ended open, so the client must see the last chunk."""
    from harness import attacker
    from loadtest.record import Outcome, Record, Request

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"9\r\ndata: {}\n\r\n" * 3 + b"0\r\n\r\n")
        await reader.read()
        writer.close()

    async def pieces(leave_after: int) -> Record:
        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            record = Record(Request(0, "x", {}, stream=True, cancel_after=leave_after), due=0.0, sent=0.0)
            asking = attacker._over_http(server.sockets[0].getsockname()[1])(record.request, record)
            await asyncio.wait_for(asking, 60.0)
            return record

    assert asyncio.run(pieces(4)).outcome is None
    assert asyncio.run(pieces(3)).outcome is Outcome.CANCELLED


def test_each_kind_has_ten_attacks() -> None:
    """With names of their own, and as a line of JSON for the process that sends them."""
    from harness.attacks import KINDS, Attack, attacks

    found = attacks(50_272)
    assert all(sum(attack.kind == kind for attack in found) >= 10 for kind in range(len(KINDS)))
    assert len({attack.name for attack in found}) == len(found)
    assert [Attack(**json.loads(json.dumps(asdict(attack)))) for attack in found] == found


def test_the_longest_wait_may_not_have_ended(neighbour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that was over before does not count; one that was under way does."""
    monkeypatch.setattr(neighbour.time, "perf_counter", lambda: 100.0)
    found = neighbour.Neighbour(1)
    found.moments = [0.0, 60.0, 65.0]
    assert found.longest_wait(62.0) == 35.0
    found.moments += [99.0, 99.5]
    assert found.longest_wait(62.0) == 34.0
    assert found.longest_wait(99.2) == 0.5


def test_the_table_has_medians_and_reasons(neighbour: Any) -> None:
    """Of all rounds; without the clients if they were not asked for."""
    waits = [(1.0, ""), (4.0, "too many"), (2.0, "")]
    rows: list[dict[str, Any]] = [{"kind": "k", "name": "a", "attack": {"wait": wait, "reason": why}} for wait, why in waits]
    assert "| k | a | 2.00 (1.00-4.00) | - | too many |" in neighbour.table(rows)
    for row in rows:
        row["clients"] = {"wait": 3.0}
    assert "| k | a | 2.00 (1.00-4.00) | 3.00 (3.00-3.00) | too many |" in neighbour.table(rows)


def test_the_port_belongs_to_tritons_server(tmp_path: Path) -> None:
    """It starts nothing of its own, and the model gets its parameter before the server starts."""
    from harness.servers import Setting
    from harness.targets import PortTarget, TritonTarget, make_targets

    setting = Setting(tmp_path, tmp_path, tmp_path, {}, {}, tmp_path)
    openai, triton, port = make_targets(["port", "openai", "triton"], setting)
    assert [target.name for target in (openai, triton, port)] == ["openai", "triton", "port"]
    assert isinstance(triton, TritonTarget)
    assert isinstance(port, PortTarget)
    assert triton.parameters.keys() == {"OPENAI_PORT"}
    assert port.start() == 0.0
    (alone,) = make_targets(["triton"], setting)
    assert isinstance(alone, TritonTarget)
    assert alone.parameters == {}
