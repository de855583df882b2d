"""The testkit's client shows what the browser client shows, on recorded streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatkeep.testkit.client import ChatView, SseReader, StreamError, comparable, wire_rows

DATA = Path(__file__).parent / "data" / "streams"
STREAMS = sorted(DATA.glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def shown(record: dict[str, Any]) -> ChatView:
    """The page after the recorded stream: the posted message and what was streamed."""
    row = record["posted"][-1]
    content = row["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = [{"type": "text", "content": p["text"]} if p["type"] == "text" else p for p in content]
    view = ChatView([{"id": row["id"], "role": "user", "parts": parts}])
    reader = SseReader()
    for _, event in reader.feed("\n".join(record["sse"]).encode()):
        view.apply(event)
    reader.close()
    return view


def test_there_are_recordings() -> None:
    assert len(STREAMS) >= 12


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_live_view_is_the_recorded_page_load(path: Path) -> None:
    """What the reducer builds from the stream is what the page load brought back."""
    record = load(path)
    live = comparable(shown(record).messages, row_ids=False)
    assert live == comparable(record["hydrated"], row_ids=False)


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_posting_the_page_posts_the_recorded_user_message(path: Path) -> None:
    """The user's row goes out as the browser posted it."""
    record = load(path)
    rows = wire_rows(record["hydrated"])
    posted = record["posted"][-1]
    (mine,) = [row for row in rows if row["id"] == posted["id"]]
    assert {k: mine[k] for k in ("id", "role", "content")} == {
        k: posted[k] for k in ("id", "role", "content")
    }


def test_bytes_may_be_cut_anywhere() -> None:
    """Events do not depend on how the body was split into chunks."""
    record = load(DATA / "server-tool.json")
    body = "\n".join(record["sse"]).encode()
    whole = SseReader().feed(body)
    reader = SseReader()
    single = [event for i in range(len(body)) for event in reader.feed(body[i : i + 1])]
    assert single == whole


@pytest.mark.parametrize(
    "body", [b"hello\n", b"data: {nope\n", b"data: []\n", b'data: {"type":"A",\ndata: "b":1}\n']
)
def test_what_the_browser_client_refuses_is_refused(body: bytes) -> None:
    with pytest.raises(StreamError):
        SseReader().feed(body)


def test_a_body_that_ends_in_a_line_is_cut_off() -> None:
    reader = SseReader()
    reader.feed(b'data: {"type":"RUN_FIN')
    with pytest.raises(StreamError, match="unterminated"):
        reader.close()
