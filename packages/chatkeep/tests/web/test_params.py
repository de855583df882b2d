"""Reading a chat request: what is taken, what is dropped, what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkeep.errors import CompositionError
from chatkeep.records import UNSET
from chatkeep.web import BadRequest, ChatParams, parse_chat_request

USER = {"id": "u1", "role": "user", "content": "hi"}


def body(**fields: Any) -> dict[str, Any]:
    return {"threadId": "t", "runId": "r", "messages": [USER], **fields}


def parse(value: Any, headers: dict[str, str] | None = None) -> ChatParams:
    return parse_chat_request(json.dumps(value).encode(), headers)


def refused(value: Any, headers: dict[str, str] | None = None) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_chat_request(
            value if isinstance(value, bytes) else json.dumps(value).encode(), headers
        )
    return caught.value


# --------------------------------------------------------------------------------- taken


def test_the_smallest_request() -> None:
    """Thread, run and messages are enough; everything else has its default."""
    params = parse(body())
    assert (params.thread_id, params.run_id, params.parent_run_id) == ("t", "r", None)
    assert [(m["id"], m["role"], m["content"]) for m in params.messages] == [("u1", "user", "hi")]
    assert (params.tools, params.context, params.resume) == ([], [], [])
    assert params.forwarded_props == {}
    assert params.state is UNSET
    assert params.seen is None


def test_a_full_request() -> None:
    """Every field arrives in its place."""
    params = parse(
        body(
            parentRunId="p",
            state={"a": 1},
            tools=[{"name": "pick", "description": "d", "parameters": {"type": "object"}}],
            context=[{"description": "zone", "value": "UTC"}],
            forwardedProps={"model": "x"},
            resume=[{"interruptId": "i", "status": "resolved", "payload": {"ok": True}}],
            data={"model": "x"},
        )
    )
    assert params.parent_run_id == "p"
    assert params.state == {"a": 1}
    assert params.tools[0].name == "pick"
    assert params.tools[0].parameters == {"type": "object"}
    assert params.context[0].value == "UTC"
    assert params.forwarded_props == {"model": "x"}
    assert params.resume == [{"interruptId": "i", "status": "resolved", "payload": {"ok": True}}]


def test_null_and_absent_are_the_same_for_optional_fields() -> None:
    """Clients that write nulls are understood."""
    names = ("parentRunId", "tools", "context", "forwardedProps", "resume")
    params = parse(body(**dict.fromkeys(names)))
    assert params == parse(body())


def test_an_object_is_read_like_its_bytes() -> None:
    """A body that a framework has parsed already gives the same."""
    assert parse_chat_request(body()) == parse(body())


def test_the_body_is_not_changed() -> None:
    """What was passed in stays as it was."""
    value = body(messages=[{**USER, "parts": [], "name": None}])
    before = copy.deepcopy(value)
    parse_chat_request(value)
    assert value == before


def test_chat_kwargs_are_those_of_chat() -> None:
    """The keywords are parameters of the engine's entry point."""
    import inspect

    from chatkeep.engine import chat

    assert set(parse(body()).chat_kwargs()) <= set(inspect.signature(chat).parameters)


def test_only_a_router_knows_the_persistence() -> None:
    """Asking for it elsewhere is a mistake with a message, not None."""
    with pytest.raises(CompositionError, match="chat_router"):
        _ = parse(body()).persistence


def test_parts_of_a_wire_row_are_dropped() -> None:
    """What counts on the wire is content; a stale copy of the parts does not come along."""
    (message,) = parse(
        body(messages=[{**USER, "parts": [{"type": "text", "content": "old"}]}])
    ).messages
    assert "parts" not in message
    assert message["content"] == "hi"


def test_nulls_of_absent_fields_are_dropped_from_rows() -> None:
    """A null that a client got from elsewhere is not stored as a value."""
    row = {**USER, "name": None, "metadata": None, "createdAt": None}
    (message,) = parse(body(messages=[row])).messages
    assert None not in message.values()


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "x"}])
def test_an_assistant_may_say_nothing(content: dict[str, Any]) -> None:
    """Content of an assistant may be absent, null or empty: it may only call tools."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {"id": "a", "role": "assistant", "toolCalls": [call], **content}
    messages = parse(body(messages=[USER, row])).messages
    assert messages[1]["toolCalls"][0]["id"] == "c"


def test_a_tool_result_may_be_a_list_of_parts() -> None:
    """Multimodal tool output comes through."""
    parts = [{"type": "text", "text": "seen"}]
    row = {"id": "x", "role": "tool", "toolCallId": "c", "content": parts}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [USER, {"id": "a", "role": "assistant", "toolCalls": [call]}, row]
    tool = parse(body(messages=rows)).messages[-1]
    assert tool["toolCallId"] == "c"
    assert isinstance(tool["content"], list)


def test_unknown_keys_of_messages_and_of_metadata_are_kept() -> None:
    """What other clients and later versions write survives."""
    row = {**USER, "mood": "good", "metadata": {"mine": 1, "tanstack": {"later": 2}}}
    (message,) = parse(body(messages=[row], surprise=1)).messages
    assert message["mood"] == "good"  # type: ignore[typeddict-item]
    assert message["metadata"]["mine"] == 1


def test_text_that_is_odd_but_storable_comes_through() -> None:
    """NUL, emoji and right-to-left text stay; half a surrogate pair becomes U+FFFD."""
    raw = (
        rb'{"threadId":"t","runId":"r","messages":'
        rb'[{"id":"u","role":"user","content":"\u0000 \ud800 \ud83d\ude00"}]}'
    )
    (message,) = parse_chat_request(raw).messages
    assert message["content"] == "\x00 \ufffd \U0001f600"


def test_big_integers_keep_their_digits() -> None:
    """No number passes through a float."""
    raw = body(forwardedProps={"n": 0}, state=0)
    text = (
        json.dumps(raw)
        .replace('"n": 0', f'"n": {2**90}')
        .replace('"state": 0', f'"state": {10**18 + 1}')
    )
    params = parse_chat_request(text.encode())
    assert params.forwarded_props["n"] == 2**90
    assert params.state == 10**18 + 1


@pytest.mark.parametrize(
    ("headers", "props", "seen"),
    [
        ({"X-Thread-Seen": "7"}, {}, 7),
        ({"x-thread-seen": " 0 "}, {}, 0),
        ({}, {"threadSeen": 12}, 12),
        ({"X-Thread-Seen": "7"}, {"threadSeen": 12}, 7),
        ({}, {"threadSeen": None}, None),
    ],
)
def test_what_the_client_has_seen(
    headers: dict[str, str], props: dict[str, Any], seen: int | None
) -> None:
    """The header or the forwarded property says it; the header wins."""
    assert parse(body(forwardedProps=props), headers).seen == seen


# ------------------------------------------------------------------------------- refused

BAD_BYTES = {
    "empty": b"",
    "no-json": b"{nope",
    "text": b"hello",
    "two-values": b"{} {}",
    "trailing": b'{"threadId":"t"',
    "latin-1": '{"threadId":"é"}'.encode("latin-1"),
    "utf-16": '{"threadId":"t"}'.encode("utf-16"),
    "utf-8-bom": b"\xef\xbb\xbf{}",
    "overlong": b'{"threadId":"\xc0\xaf"}',
    "cesu": b'{"threadId":"\xed\xa0\x80"}',
    "nan": b'{"threadId":"t","runId":"r","messages":[],"state":NaN}',
    "infinity": b'{"threadId":"t","runId":"r","messages":[],"state":-Infinity}',
    "huge-float": b'{"threadId":"t","runId":"r","messages":[],"state":1e999}',
    "huge-int": b'{"threadId":"t","runId":"r","messages":[],"state":' + b"9" * 5000 + b"}",
    "deep-state": b'{"threadId":"t","runId":"r","messages":[],"state":'
    + b"[" * 300
    + b"]" * 300
    + b"}",
    "bottomless": b"[" * 100_000,
    "raw-control": b'{"threadId":"t\x01"}',
}


@pytest.mark.parametrize("raw", BAD_BYTES.values(), ids=BAD_BYTES)
def test_bytes_that_are_no_request(raw: bytes) -> None:
    """Whatever is wrong with the bytes is one kind of error with a place."""
    assert refused(raw).path.startswith("$")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "null": (None, "$.messages[0]"),
    "text": ("hi", "$.messages[0]"),
    "no-id": ({"role": "user", "content": "x"}, "$.messages[0].id"),
    "id-number": ({**USER, "id": 1}, "$.messages[0].id"),
    "id-empty": ({**USER, "id": ""}, "$.messages[0].id"),
    "id-nul": ({**USER, "id": "a\x00b"}, "$.messages[0].id"),
    "id-surrogate": ({**USER, "id": "\ud800"}, "$.messages[0].id"),
    "id-long": ({**USER, "id": "x" * 1025}, "$.messages[0].id"),
    "no-role": ({"id": "u", "content": "x"}, "$.messages[0].role"),
    "role-unknown": ({**USER, "role": "wizard"}, "$.messages[0].role"),
    "role-list": ({**USER, "role": ["user"]}, "$.messages[0].role"),
    "user-null": ({**USER, "content": None}, "$.messages[0].content"),
    "user-number": ({**USER, "content": 5}, "$.messages[0].content"),
    "user-object": ({**USER, "content": {}}, "$.messages[0].content"),
    "user-only-parts": ({"id": "u", "role": "user", "parts": []}, "$.messages[0].content"),
    "part-text": ({**USER, "content": ["x"]}, "$.messages[0].content[0]"),
    "part-no-type": ({**USER, "content": [{}]}, "$.messages[0].content[0].type"),
    "assistant-list": ({"id": "a", "role": "assistant", "content": []}, "$.messages[0].content"),
    "assistant-number": ({"id": "a", "role": "assistant", "content": 1}, "$.messages[0].content"),
    "calls-object": ({"id": "a", "role": "assistant", "toolCalls": {}}, "$.messages[0].toolCalls"),
    "call-null": (
        {"id": "a", "role": "assistant", "toolCalls": [None]},
        "$.messages[0].toolCalls[0]",
    ),
    "call-no-id": (
        {"id": "a", "role": "assistant", "toolCalls": [{**CALL, "id": None}]},
        "$.messages[0].toolCalls[0].id",
    ),
    "call-no-function": (
        {"id": "a", "role": "assistant", "toolCalls": [{"id": "c"}]},
        "$.messages[0].toolCalls[0].function",
    ),
    "call-arguments-object": (
        {
            "id": "a",
            "role": "assistant",
            "toolCalls": [{**CALL, "function": {"name": "f", "arguments": {}}}],
        },
        "$.messages[0].toolCalls[0].function.arguments",
    ),
    "tool-no-call": ({"id": "x", "role": "tool", "content": "1"}, "$.messages[0].toolCallId"),
    "tool-null": (
        {"id": "x", "role": "tool", "toolCallId": "c", "content": None},
        "$.messages[0].content",
    ),
    "tool-error-object": (
        {"id": "x", "role": "tool", "toolCallId": "c", "content": "1", "error": {}},
        "$.messages[0].error",
    ),
    "system-list": ({"id": "s", "role": "system", "content": []}, "$.messages[0].content"),
    "reasoning-null": ({"id": "s", "role": "reasoning"}, "$.messages[0].content"),
    "activity-text": (
        {"id": "s", "role": "activity", "activityType": "x", "content": "y"},
        "$.messages[0].content",
    ),
    "activity-no-type": (
        {"id": "s", "role": "activity", "content": {}},
        "$.messages[0].activityType",
    ),
    "metadata-list": ({**USER, "metadata": []}, "$.messages[0].metadata"),
    "name-number": ({**USER, "name": 3}, "$.messages[0].name"),
    "created-number": ({**USER, "createdAt": 3}, "$.messages[0].createdAt"),
}


@pytest.mark.parametrize(("row", "path"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_message_that_is_none(row: Any, path: str) -> None:
    """The error names the place inside the message."""
    assert refused(body(messages=[row])).path == path


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "thread-missing": ({"threadId": None}, "$.threadId"),
    "thread-number": ({"threadId": 5}, "$.threadId"),
    "thread-empty": ({"threadId": ""}, "$.threadId"),
    "thread-nul": ({"threadId": "\x00"}, "$.threadId"),
    "thread-long": ({"threadId": "é" * 513}, "$.threadId"),
    "run-missing": ({"runId": None}, "$.runId"),
    "run-surrogate": ({"runId": "x\udfff"}, "$.runId"),
    "parent-number": ({"parentRunId": 1}, "$.parentRunId"),
    "parent-empty": ({"parentRunId": ""}, "$.parentRunId"),
    "messages-missing": ({"messages": None}, "$.messages"),
    "messages-object": ({"messages": {}}, "$.messages"),
    "tools-object": ({"tools": {}}, "$.tools"),
    "tool-text": ({"tools": ["x"]}, "$.tools[0]"),
    "tool-no-name": ({"tools": [{"description": "d"}]}, "$.tools[0].name"),
    "tool-empty-name": ({"tools": [{"name": ""}]}, "$.tools[0].name"),
    "tool-parameters": ({"tools": [{"name": "x", "parameters": "y"}]}, "$.tools[0].parameters"),
    "tool-no-schema": (
        {"tools": [{"name": "x", "parameters": {"type": "wizard"}}]},
        "$.tools[0].parameters",
    ),
    "context-text": ({"context": "x"}, "$.context"),
    "context-value": ({"context": [{"description": "d", "value": 1}]}, "$.context[0].value"),
    "props-list": ({"forwardedProps": []}, "$.forwardedProps"),
    "resume-object": ({"resume": {}}, "$.resume"),
    "resume-no-id": ({"resume": [{"status": "resolved"}]}, "$.resume[0].interruptId"),
    "resume-status": (
        {"resume": [{"interruptId": "i", "status": "maybe"}]},
        "$.resume[0].status",
    ),
    "resume-metadata": (
        {"resume": [{"interruptId": "i", "status": "resolved", "metadata": 1}]},
        "$.resume[0].metadata",
    ),
    "seen-text": ({"forwardedProps": {"threadSeen": "5"}}, "$.forwardedProps.threadSeen"),
    "seen-true": ({"forwardedProps": {"threadSeen": True}}, "$.forwardedProps.threadSeen"),
    "seen-negative": ({"forwardedProps": {"threadSeen": -1}}, "$.forwardedProps.threadSeen"),
}


@pytest.mark.parametrize(("fields", "path"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_field_of_the_wrong_kind(fields: dict[str, Any], path: str) -> None:
    """The error names the field."""
    assert refused(body(**fields)).path == path


@pytest.mark.parametrize("value", [None, [], "x", 1, True])
def test_a_body_that_is_no_object(value: Any) -> None:
    assert refused(value).path == "$"


def test_tools_are_bounded() -> None:
    """Their schemas are checked while nobody else is served."""
    tool = {"name": "x", "description": "d", "parameters": {"type": "object"}}
    assert len(parse(body(tools=[tool] * 256)).tools) == 256
    assert refused(body(tools=[tool] * 257)).path == "$.tools"
    assert refused(body(tools=[{**tool, "description": "x" * (1 << 20)}])).path == "$.tools"
    assert refused(body(tools=[{**tool, "parameters": {"$schema": 5}}])).path.startswith("$.tools")


@pytest.mark.parametrize("seen", ["", "x", "-1", "1.5", "²", "1" * 30])
def test_a_seen_header_that_is_no_number(seen: str) -> None:
    """A guard that cannot be read is no guard: refused, not ignored."""
    assert refused(body(), {"X-Thread-Seen": seen}).path == "X-Thread-Seen"


def test_the_run_of_the_header_is_the_run_of_the_body() -> None:
    """A reconnect goes by the header, so the two must agree."""
    assert parse(body(), {"X-Run-Id": "r"}).run_id == "r"
    assert refused(body(), {"x-run-id": "other"}).path == "$.runId"


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            (
                "threadId",
                "runId",
                "messages",
                "tools",
                "context",
                "resume",
                "state",
                "forwardedProps",
            ),
            JSON_VALUES,
        ),
    )
)
def test_any_json_is_read_or_refused(value: dict[str, Any]) -> None:
    """There is no third way out."""
    try:
        params = parse_chat_request(json.dumps(value).encode())
    except BadRequest:
        return
    assert params.thread_id == value["threadId"]


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(
            (
                "id",
                "role",
                "content",
                "toolCalls",
                "toolCallId",
                "metadata",
                "error",
                "parts",
                "name",
            )
        ),
        JSON_VALUES
        | st.sampled_from(("user", "assistant", "tool", "system", "activity", "reasoning")),
    )
)
def test_any_message_is_read_or_refused(row: dict[str, Any]) -> None:
    """A row that gets through has what every message has."""
    try:
        params = parse_chat_request(json.dumps(body(messages=[row])).encode())
    except BadRequest:
        return
    assert all(message["id"] for message in params.messages)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """Noise never gets further than the parser."""
    with pytest.raises(BadRequest):
        parse_chat_request(raw)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"runId": "r", "messages": []}, "$.threadId"),
        ({"threadId": "t", "messages": []}, "$.runId"),
        ({"threadId": "t", "runId": "r"}, "$.messages"),
        (
            {"threadId": "t", "runId": "r", "messages": [{"role": "user", "content": "x"}]},
            "$.messages[0].id",
        ),
    ],
)
def test_what_is_absent_is_called_missing(body: dict[str, Any], path: str) -> None:
    """Not "must be text, not null": nobody sent null."""
    with pytest.raises(BadRequest) as caught:
        parse_chat_request(body)
    assert (caught.value.path, caught.value.reason) == (path, "is missing")
