"""The testkit's page answers as the browser client answered, on recorded pauses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatkeep.testkit.client import ChatView, SseReader
from chatkeep.testkit.tab import Tab, user_message

PAUSES = sorted((Path(__file__).parent / "data" / "answers").glob("*.json"))


def page(record: dict[str, Any]) -> Tab:
    """The page that answered: the one that saw the pause, or one that loaded it."""
    tab = Tab(httpx.AsyncClient(), "http://chat.test", record["threadId"])
    if record["page"] is not None:
        loaded = record["page"]
        tab.show(ChatView(loaded["messages"], interrupts=loaded["interrupts"]))
        return tab
    (row,) = record["posted"]
    shown = {**user_message(row["content"]), "id": row["id"]}
    tab.show(ChatView([shown]))
    for _, event in SseReader().feed("\n".join(record["sse"]).encode()):
        tab.view.apply(event)
    tab.live_pause = True
    return tab


def stage(tab: Tab, answer: str, fields: dict[str, Any]) -> None:
    if answer == "approve-all":
        for descriptor in list(tab.pending):
            tab.approve(descriptor["id"])
    else:
        getattr(tab, answer)(**fields)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the times that each client makes up for itself."""
    clean: list[dict[str, Any]] = json.loads(json.dumps(rows))
    for row in clean:
        bag = row.get("metadata", {}).get("tanstack", {})
        bag.pop("createdAt", None)
        if not bag:
            row.get("metadata", {}).pop("tanstack", None)
        if not row.get("metadata", True):
            del row["metadata"]
    return clean


def test_there_are_recordings() -> None:
    assert len(PAUSES) >= 12


@pytest.mark.parametrize("path", PAUSES, ids=lambda path: path.stem)
def test_an_answer_is_posted_as_the_browser_posted_it(path: Path) -> None:
    """Parent run, entries with their metadata, and every row with its placeholder or failure."""
    record = json.loads(path.read_text(encoding="utf-8"))
    tab = page(record)
    stage(tab, record["answer"], record["fields"])
    posted = tab.body(**tab.batch())
    recorded = record["body"]
    assert posted["parentRunId"] == recorded["parentRunId"] == record["runId"]
    assert posted["resume"] == recorded["resume"]
    assert without_times(posted["messages"]) == without_times(recorded["messages"])


def test_a_question_that_is_not_there_cannot_be_answered() -> None:
    """By mistake in a test nothing is posted; the message says what waits."""
    record = json.loads(PAUSES[0].read_text(encoding="utf-8"))
    tab = page(record)
    with pytest.raises(AssertionError, match=r"0 questions 'x'.*tool-approval"):
        tab.approve("x")
    with pytest.raises(AssertionError, match="0 questions None"):
        tab.answer(response=1)


def test_what_was_staged_goes_out_once() -> None:
    record = json.loads(PAUSES[0].read_text(encoding="utf-8"))
    tab = page(record)
    tab.cancel()
    assert len(tab.batch()["resume"]) == 1
    assert tab.batch()["resume"] == []
