"""The official AG-UI client accepts our stream, and shows what a reload brings back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server import ChatServer

pytestmark = pytest.mark.node

SCRIPT = Path(__file__).with_name("official_client.mjs")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    running = ChatServer(f"sqlite:///{tmp_path_factory.mktemp('wire') / 'chat.db'}").start()
    yield running
    running.close()


def talk(server: ChatServer, thread_id: str, *contents: str) -> list[dict[str, Any]]:
    """What the client has after each message that it sent."""
    node = shutil.which("node")
    modules = os.environ.get("CHATKEEP_TEST_NODE_MODULES", "")
    if node is None or not (Path(modules) / "@ag-ui" / "client").exists():
        pytest.fail(
            "these tests need Node.js, and CHATKEEP_TEST_NODE_MODULES with the packages of "
            "tests/wire/package.json: nox -s tests-wire installs both",
            pytrace=False,
        )
    done = subprocess.run(
        [node, str(SCRIPT)],
        input=json.dumps({"url": server.url, "threadId": thread_id, "contents": contents}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    turns: list[dict[str, Any]] = json.loads(done.stdout)
    return turns


def reload(server: ChatServer, thread_id: str) -> list[dict[str, Any]]:
    page = httpx.get(server.url, params={"threadId": thread_id}).json()
    messages: list[dict[str, Any]] = page["messages"]
    return messages


def types(turn: dict[str, Any]) -> list[str]:
    return [event["type"] for event in turn["events"]]


@pytest.mark.parametrize(
    "scenario",
    ["text", "slow", "reasoning", "server-tool", "server-tool-text", "server-tool-error"],
)
def test_a_turn_is_accepted_and_comes_back_under_the_same_ids(
    server: ChatServer, scenario: str
) -> None:
    [turn] = talk(server, f"official-{scenario}", f"SCENARIO:{scenario}")
    assert turn["failure"] is None
    assert types(turn)[0] == "RUN_STARTED"
    assert types(turn)[-1] == "RUN_FINISHED"
    shown = [m["id"] for m in turn["messages"] if m["role"] in {"user", "assistant"}]
    stored = [m["id"] for m in reload(server, f"official-{scenario}")]
    assert shown == stored
    assert len(stored) >= 2


def test_a_conversation_goes_on_from_the_history_that_the_client_sends(server: ChatServer) -> None:
    turns = talk(server, "official-talk", "Hello", "SCENARIO:server-tool", "Hello again")
    assert [turn["failure"] for turn in turns] == [None, None, None]
    shown = [m["id"] for m in turns[-1]["messages"] if m["role"] in {"user", "assistant"}]
    assert shown == [m["id"] for m in reload(server, "official-talk")]
    assert [m["id"] for m in turns[-1]["messages"] if m["role"] == "user"] == [
        "user-0", "user-1", "user-2"
    ]  # fmt: skip


@pytest.mark.parametrize("scenario", ["error", "error-early"])
def test_a_run_that_fails_is_a_failure_and_not_a_broken_stream(
    server: ChatServer, scenario: str
) -> None:
    failed, after = talk(server, f"official-{scenario}", f"SCENARIO:{scenario}", "Hello")
    assert types(failed)[0] == "RUN_STARTED"
    assert types(failed)[-1] == "RUN_ERROR"
    assert failed["failure"] is None or "scripted" in failed["failure"]
    assert types(after)[-1] == "RUN_FINISHED"
