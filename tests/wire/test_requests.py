"""Everything that the browser client was seen to post is read, and read right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatkeep.messages import model_to_wire
from chatkeep.web import parse_chat_request

REQUESTS = sorted((Path(__file__).parent / "data" / "requests").glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_are_recordings() -> None:
    assert len(REQUESTS) >= 70


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_a_recorded_request_is_read(path: Path) -> None:
    """Ids, messages, tools, answers and properties arrive; nothing that was posted is lost."""
    record = load(path)
    body = record["body"]
    params = parse_chat_request(json.dumps(body).encode(), record["headers"])
    assert (params.thread_id, params.run_id) == (body["threadId"], body["runId"])
    assert params.parent_run_id == body.get("parentRunId")
    assert params.resume == body.get("resume", [])
    assert [t.name for t in params.tools] == [t["name"] for t in body["tools"]]
    assert [t.parameters for t in params.tools] == [t["parameters"] for t in body["tools"]]
    assert params.forwarded_props == body["forwardedProps"]
    assert params.state == body["state"]
    assert params.seen is None
    roles = [row["role"] for row in body["messages"]]
    # Reasoning rows become part of the assistant message behind them.
    assert [m["role"] for m in params.messages] == [r for r in roles if r != "reasoning"]


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_what_was_posted_goes_out_again(path: Path) -> None:
    """Texts, media parts, calls and results of the rows survive reading and writing."""
    body = load(path)["body"]
    params = parse_chat_request(body)
    sent = {row["id"]: row for row in model_to_wire(params.messages)}
    for row in body["messages"]:
        if row["role"] == "tool":
            continue  # known by its call, not by its id
        mine = sent[row["id"]]
        for key in ("role", "content", "toolCalls"):
            assert mine.get(key) == row.get(key), key
    results = {row["toolCallId"]: row for row in sent.values() if row["role"] == "tool"}
    for row in body["messages"]:
        if row["role"] == "tool":
            assert results[row["toolCallId"]]["content"] == row["content"]
            assert results[row["toolCallId"]].get("error") == row.get("error")
