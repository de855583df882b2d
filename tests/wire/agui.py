"""The official AG-UI client as a program that tests run, and what its list is compared with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from chatkeep.testkit.tab import Tab
from e2e.server import ChatServer

__all__ = ["Drive", "drive_client", "page", "rows_of", "same_rows"]

Drive: TypeAlias = Callable[..., dict[str, Any]]

SCRIPT = Path(__file__).with_name("agui_client.cjs")


def drive_client(**job: Any) -> dict[str, Any]:
    """Run the client's program on a job; see ``agui_client.cjs``."""
    node = shutil.which("node")
    if node is None:
        pytest.fail("no node on PATH: run nox -s tests-wire, or install Node.js 20")
    if "CHATKEEP_TEST_NODE_MODULES" not in os.environ:
        pytest.fail(
            "CHATKEEP_TEST_NODE_MODULES is not set: run nox -s tests-wire, or npm ci in tests/wire "
            "and name its node_modules"
        )
    done = subprocess.run(
        [node, str(SCRIPT)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


async def page(server: ChatServer, thread_id: str) -> Tab:
    """A freshly loaded page."""
    async with httpx.AsyncClient() as http:
        tab = Tab(http, server.url, thread_id)
        await tab.load()
        return tab


def rows_of(messages: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Role and id of every row behind a page's messages: reasoning, anchors and tool results."""
    rows: list[tuple[str, str]] = []
    for message in messages:
        parts = message["parts"]
        rows += [("reasoning", p["id"]) for p in parts if p["type"] == "thinking"]
        rows.append((message["role"], message["id"]))
        rows += [("tool", p["id"]) for p in parts if p["type"] == "tool-result"]
    return rows


def same_rows(turn: Mapping[str, Any]) -> None:
    """After a turn the client's list and the page load have the same rows under the same ids in
    the same order, none twice, with the same contents; and the same questions wait."""
    shown = [(message["role"], message["id"]) for message in turn["messages"]]
    assert len(set(shown)) == len(shown)
    hydrated = turn["hydrated"]
    assert rows_of(hydrated["messages"]) == shown
    texts = {m["id"]: "".join(map(_text, m["parts"])) for m in hydrated["messages"]}
    parts = {p["id"]: p for m in hydrated["messages"] for p in m["parts"] if "id" in p}
    activities = {
        m["id"]: p["content"]
        for m in hydrated["messages"]
        for p in m["parts"]
        if p["type"] == "activity"
    }
    for message in turn["messages"]:
        match message["role"]:
            case "user" | "assistant":
                assert (message.get("content") or "") == texts[message["id"]]
                for call in message.get("toolCalls", ()):
                    part = parts[call["id"]]
                    function = {"name": part["name"], "arguments": part["arguments"]}
                    assert call["function"] == function
            case "activity":
                assert message["content"] == activities[message["id"]]
            case _:
                assert message["content"] == parts[message["id"]]["content"]
    waiting = (hydrated["interrupts"] or {}).get("pending", [])
    assert [{k: v for k, v in d.items() if k != "owner"} for d in waiting] == turn["interrupts"]


def _text(part: Mapping[str, Any]) -> str:
    """What of a part a client without structured parts shows as text."""
    if part["type"] == "structured-output":
        return str(part["raw"])
    return str(part["content"]) if part["type"] == "text" else ""
