"""The official AG-UI client pauses, answers and goes on; after every step its list is the stored
one, row for row."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.testkit.scripted import browser_tools
from e2e.server import ChatServer
from wire.agui import Drive, same_rows

pytestmark = [pytest.mark.anyio, pytest.mark.node]

YES = {"status": "resolved", "payload": {"approved": True}}
NO = {"status": "resolved", "payload": {"approved": False}}
CANCEL = {"status": "cancelled"}
CITY = {"status": "resolved", "payload": {"city": "Berlin"}}
FAILED = {
    "status": "resolved",
    "payload": {"error": "permission denied"},
    "metadata": {"tanstack": {"state": "output-error"}},
}
SENT = '{"sent":true,"to":"ada@example.com"}'
CANCELLED = '{"error":"Tool execution cancelled"}'


def said(turn: dict[str, Any]) -> str:
    """The text of the client's last assistant message."""
    last = [m for m in turn["messages"] if m["role"] == "assistant"][-1]
    text: str = last.get("content") or ""
    return text


def checked(result: dict[str, Any], *outcomes: str) -> list[dict[str, Any]]:
    """The turns of a talk, each well-formed to the client and equal to what is stored."""
    turns: list[dict[str, Any]] = result["turns"]
    assert result["warnings"] == []
    assert [turn["error"] for turn in turns] == [None] * len(turns)
    assert [turn["outcome"] for turn in turns] == list(outcomes)
    for turn in turns:
        assert turn["events"][0] == "RUN_STARTED"
        assert turn["events"][-1] in ("RUN_FINISHED", "RUN_ERROR")
        same_rows(turn)
    return turns


@pytest.mark.parametrize(
    ("scenario", "answers", "text"),
    [
        ("approval", {"approval": YES}, f"Email outcome: {SENT}"),
        (
            "approval",
            {"approval": NO},
            'Email outcome: {"error":"User declined tool execution"}',
        ),
        ("approval", {"approval": CANCEL}, f"Email outcome: {CANCELLED}"),
        (
            "approval",
            {
                "approval": {
                    "status": "resolved",
                    "payload": {
                        "approved": True,
                        "editedArgs": {"to": "grace@example.com", "subject": "Hi"},
                    },
                }
            },
            'Email outcome: {"sent":true,"to":"grace@example.com"}',
        ),
        (
            "approval-two",
            {"approval": YES},
            f'Email outcomes: {SENT} | {{"sent":true,"to":"bob@example.com"}}',
        ),
        ("client-tool", {"client_tool": CITY}, 'Location outcome: {"city":"Berlin"}'),
        ("client-tool", {"client_tool": CANCEL}, f"Location outcome: {CANCELLED}"),
        (
            "client-tool",
            {"client_tool": FAILED},
            'Location outcome: {"error":"permission denied"}',
        ),
        ("client-tool-adhoc", {"client_tool": CITY}, 'Adhoc outcome: {"city":"Berlin"}'),
        ("generic", {"generic": YES}, 'Generic outcome: {"approved":true}'),
        ("generic", {"generic": CANCEL}, 'Generic outcome: {"status":"cancelled"}'),
        (
            "mixed-server",
            {"approval": YES, "client_tool": CITY},
            f'Mixed outcome: {{"city":"Paris","tempC":21}} | {SENT} | {{"city":"Berlin"}}',
        ),
        (
            "ui-resource",
            {"client_tool": {"status": "resolved", "payload": {"clicked": True}}},
            'Widget outcome: widget shown | {"clicked":true}',
        ),
        (
            "ui-resource-parallel",
            {"client_tool": {"status": "resolved", "payload": "clicked"}},
            "Widget outcome: widget shown | clicked",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
async def test_a_pause_and_its_answer(
    server: ChatServer,
    drive: Drive,
    request: pytest.FixtureRequest,
    scenario: str,
    answers: dict[str, Any],
    text: str,
) -> None:
    """It never names a parent run, and answers with the client's own builder."""
    result = drive(
        url=server.url,
        threadId=request.node.name,
        tools=browser_tools("send_email", "get_location", "adhoc_client_tool"),
        turns=[
            {"text": "SCENARIO:activity"},
            {"text": f"SCENARIO:{scenario}"},
            {"answers": answers},
            {"text": "SCENARIO:inspect"},
        ],
    )
    turns = checked(result, "success", "interrupt", "success", "success")
    assert said(turns[2]) == text
    assert turns[2]["interrupts"] == []


async def test_questions_one_after_the_other(
    server: ChatServer, drive: Drive, request: pytest.FixtureRequest
) -> None:
    """A continuation that pauses again, and one that asks what an approval led to."""
    color = {"status": "resolved", "payload": "red"}
    photo = {"status": "resolved", "payload": {"url": "https://example.com/1.jpg"}}
    result = drive(
        url=server.url,
        threadId=request.node.name,
        tools=browser_tools("get_location", "pick_color", "share_photo"),
        turns=[
            {"text": "SCENARIO:client-tool-sequence"},
            {"answers": {"client_tool": CITY}},
            {"answers": {"client_tool": color}},
            {"text": "SCENARIO:approval-client"},
            {"answers": {"approval": YES}},
            {"answers": {"client_tool": photo}},
        ],
    )
    outcomes = ["interrupt", "interrupt", "success"] * 2
    turns = checked(result, *outcomes)
    assert said(turns[2]) == 'Sequence outcome: {"city":"Berlin"} | red'
    assert said(turns[5]) == 'Photo outcome: {"url":"https://example.com/1.jpg"}'


async def test_a_refusal_is_a_failed_run_and_the_question_waits(
    server: ChatServer, drive: Drive, request: pytest.FixtureRequest
) -> None:
    """Wrong and forged answers and input that ignores the question: its list stays what is
    stored, and the right answer is taken in the end."""
    entry = {"interruptId": "approval_nobody", **YES}
    result = drive(
        url=server.url,
        threadId=request.node.name,
        turns=[
            {"text": "SCENARIO:approval"},
            {"answers": {"approval": {"status": "resolved", "payload": "perhaps"}}},
            {"resume": [entry], "forget": True},
            {"answers": {"approval": YES}, "recall": True},
        ],
    )
    turns = result["turns"]
    assert result["warnings"] == []
    codes = [turn.get("code") for turn in turns]
    assert codes == [None, "invalid-payload", "unknown-interrupt", None]
    for turn in turns:
        assert turn["events"][0] == "RUN_STARTED"
        assert turn["error"] is None
        shown = [(m["role"], m["id"]) for m in turn["messages"]]
        assert len(set(shown)) == len(shown)
    for refused in turns[1:3]:
        assert refused["events"] == ["RUN_STARTED", "RUN_ERROR"]
        assert refused["hydrated"] == turns[0]["hydrated"]
        assert refused["messages"] == turns[0]["messages"]
    assert turns[3]["outcome"] == "success"
    same_rows(turns[3])


async def test_input_to_a_paused_thread_is_refused(
    server: ChatServer, drive: Drive, request: pytest.FixtureRequest
) -> None:
    """The client itself does not send past an open interrupt; one that forgot it is refused, and
    nothing that it said is kept."""
    result = drive(
        url=server.url,
        threadId=request.node.name,
        turns=[{"text": "SCENARIO:generic"}, {"text": "SCENARIO:text", "forget": True}],
    )
    first, second = result["turns"]
    assert second["events"] == ["RUN_STARTED", "RUN_ERROR"]
    assert second["code"] == "unknown-interrupt"
    assert second["hydrated"] == first["hydrated"]
