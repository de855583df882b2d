"""Properties of the conversions and of the merge, on generated transcripts."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatkeep.codec import decode, encode
from chatkeep.messages import (
    ensure_ids,
    merge_messages,
    model_to_ui,
    model_to_wire,
    provider_view,
    ui_to_model,
    wire_to_model,
)

Row = dict[str, Any]

settings.register_profile("messages", deadline=None, max_examples=50)
SETTINGS = settings(settings.get_profile("messages"), suppress_health_check=[HealthCheck.too_slow])

words = st.text(alphabet="abc {}[]\"'\\é\U0001f525\n", min_size=1, max_size=12)
times = st.sampled_from(["2026-11-30T12:00:00.000Z", "2025-01-01T00:00:00+02:00"])
jsons = st.recursive(
    st.booleans() | st.integers(-5, 5) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
unknown = st.dictionaries(st.sampled_from(["future", "x-mine", "encryptedNote"]), jsons, max_size=2)
bags = st.fixed_dictionaries(
    {},
    optional={
        "run": st.just({"id": "r"}),
        "model": words,
        "responseId": words,
        "stopReason": st.sampled_from(["error", "aborted"]),
        "unheardOf": jsons,
    },
)
media = st.sampled_from(["image", "audio", "video", "document"]).map(
    lambda kind: {"type": kind, "source": {"type": "url", "value": "https://x/y"}}
)
texts = words.map(lambda text: {"type": "text", "content": text})


@st.composite
def metadata(draw: st.DrawFn) -> Row:
    found = dict(draw(st.dictionaries(st.sampled_from(["mine", "k"]), jsons, max_size=2)))
    bag = draw(bags)
    if bag:
        found["tanstack"] = bag
    return found


class Ids:
    def __init__(self) -> None:
        self.count = 0

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"


@st.composite
def common(draw: st.DrawFn, role: str, name: str) -> Row:
    row: Row = {"id": name, "role": role, **draw(unknown)}
    if draw(st.booleans()):
        row["createdAt"] = draw(times)
    found = draw(metadata())
    if found:
        row["metadata"] = found
    return row


@st.composite
def user_row(draw: st.DrawFn, ids: Ids) -> Row:
    row = draw(common("user", ids.new("u")))
    parts = draw(st.lists(texts | media, max_size=3))
    if any(p["type"] != "text" for p in parts):
        row["content"] = parts
    else:
        row["content"] = draw(words)
    if draw(st.booleans()):
        row["name"] = draw(words)
    return row


@st.composite
def turn(draw: st.DrawFn, ids: Ids) -> list[Row]:
    """One model turn: the assistant row and the results of its calls."""
    row = draw(common("assistant", ids.new("a")))
    row["content"] = draw(st.none() | words)
    thoughts = draw(
        st.lists(
            st.fixed_dictionaries(
                {"content": words}, optional={"signature": words, "x-provider": words}
            ),
            max_size=2,
        )
    )
    for thought in thoughts:
        if draw(st.booleans()):
            thought["id"] = ids.new("r")
    if thoughts:
        row["thinking"] = thoughts
    calls: list[Row] = []
    for _ in range(draw(st.integers(0, 3))):
        call: Row = {
            "id": ids.new("c"),
            "type": "function",
            "function": {"name": draw(words), "arguments": draw(jsons.map(json.dumps) | words)},
        }
        if draw(st.booleans()):
            call["metadata"] = draw(
                st.fixed_dictionaries({"k": jsons}, optional={"thoughtSignature": words})
            )
        calls.append(call)
    if calls:
        row["toolCalls"] = calls
        if draw(st.booleans()):
            widget = {
                "type": "ui-resource",
                "toolCallId": calls[0]["id"],
                "toolName": "f",
                "resource": {"uri": "ui://x", "mimeType": "text/html"},
            }
            bag = {**row.get("metadata", {}).get("tanstack", {}), "uiResources": [widget]}
            row["metadata"] = {**row.get("metadata", {}), "tanstack": bag}
    elif row["content"] and draw(st.booleans()):
        raw = json.dumps(draw(jsons))
        part = {"type": "structured-output", "status": "complete", "raw": raw, "data": 1}
        row["structuredOutput"] = part
        row["content"] = draw(st.sampled_from([raw, row["content"] + raw]))
    rows = [row]
    for call in draw(st.permutations(calls)):
        if draw(st.integers(0, 5)) == 0:
            continue
        found = draw(common("tool", ids.new("t")))
        found["toolCallId"] = call["id"]
        found["content"] = draw(words | st.lists(texts | media, min_size=1, max_size=2))
        if draw(st.booleans()):
            found["error"] = draw(words)
        rows.append(found)
    return rows


@st.composite
def transcripts(draw: st.DrawFn) -> list[Any]:
    ids = Ids()
    rows: list[Row] = []
    for _ in range(draw(st.integers(0, 3))):
        rows.append(draw(user_row(ids)))
        for _ in range(draw(st.integers(0, 2))):
            rows.extend(draw(turn(ids)))
    return rows


def lossy(rows: list[Any]) -> list[Any]:
    """What a browser posts of rows that it streamed."""
    wire = json.loads(json.dumps(model_to_wire(rows)))
    kept = ("createdAt", "model", "toolCallMetadata", "uiResources")
    for row in wire:
        bag = row.get("metadata", {}).get("tanstack")
        if row["role"] == "tool":
            row["id"] = f"tool-{row['toolCallId']}"
            row["metadata"] = {"tanstack": {"toolResult": {}}}
        elif bag is not None:
            row["metadata"]["tanstack"] = {k: v for k, v in bag.items() if k in kept}
    return wire_to_model(wire).messages


@SETTINGS
@given(transcripts())
def test_a_transcript_comes_back_from_the_wire_as_it_was(rows: list[Any]) -> None:
    """Ids, order, pairing, thinking, signatures, errors, bags and unknown keys survive."""
    wire = model_to_wire(rows)
    assert wire_to_model(json.loads(json.dumps(wire))).messages == rows


@SETTINGS
@given(transcripts())
def test_a_transcript_comes_back_from_the_browser_as_it_was(rows: list[Any]) -> None:
    ui = model_to_ui(rows)
    assert ui_to_model(json.loads(json.dumps(ui))) == rows
    assert len({m["id"] for m in ui}) == len(ui)
    assert all({"id", "role", "parts"} <= set(m) for m in ui)


@SETTINGS
@given(transcripts())
def test_a_stored_transcript_reads_and_paints_the_same(rows: list[Any]) -> None:
    """The codec changes nothing that a conversion looks at."""
    stored = decode(encode(rows))
    assert model_to_wire(stored) == model_to_wire(rows)
    assert model_to_ui(stored) == model_to_ui(rows)


@SETTINGS
@given(transcripts())
def test_reading_model_messages_changes_nothing(rows: list[Any]) -> None:
    assert all(a is b for a, b in zip(wire_to_model(rows).messages, rows, strict=True))


@SETTINGS
@given(transcripts())
def test_every_call_that_is_sent_has_one_result_and_every_result_a_call(rows: list[Any]) -> None:
    """And it stands right behind its message; sending twice gives the same."""
    view = provider_view(rows)
    open_calls: list[str] = []
    for row in view:
        if row["role"] == "tool":
            open_calls.remove(row["toolCallId"])
        else:
            assert not open_calls
            open_calls = [c["id"] for c in row.get("toolCalls", [])]
    assert not open_calls
    assert provider_view(view) == view


@SETTINGS
@given(transcripts())
def test_posting_everything_that_is_shown_changes_nothing(rows: list[Any]) -> None:
    for post in (rows, lossy(rows), wire_to_model(model_to_wire(rows)).messages):
        merge = merge_messages(rows, post)
        assert merge.kind == "continue"
        assert all(a is b for a, b in zip(merge.messages, rows, strict=True))


@st.composite
def posts(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """A stored thread, and what some client makes of it."""
    stored = draw(transcripts())
    post = lossy(stored)
    keep = draw(st.lists(st.booleans(), min_size=len(post), max_size=len(post)))
    post = [row for row, kept in zip(post, keep, strict=True) if kept or draw(st.booleans())]
    if draw(st.booleans()):
        post = post[: draw(st.integers(0, len(post)))]
    for place, row in enumerate(post):
        change = draw(st.integers(0, 9))
        if change == 0 and row["role"] in ("user", "assistant"):
            post[place] = {**row, "content": draw(words)}
        elif change == 1 and row["role"] != "tool":
            post[place] = {**row, "metadata": {"mine": draw(jsons), "tanstack": {"z": 1}}}
        elif change == 2 and row["role"] == "assistant":
            post[place] = {"id": row["id"], "role": "assistant", "content": None}
    if draw(st.integers(0, 4)) == 0:
        post = draw(st.permutations(post))
    ids = Ids()
    ids.count = 1000
    extra: list[Row] = []
    for _ in range(draw(st.integers(0, 2))):
        extra.append(draw(user_row(ids)))
        extra.extend(draw(turn(ids)))
    if extra and draw(st.booleans()):
        last = draw(user_row(ids))
        extra.append({k: v for k, v in last.items() if k != "id"} if draw(st.booleans()) else last)
    return stored, [*post, *extra]


@SETTINGS
@given(posts())
def test_a_merge_loses_nothing_but_what_it_says(case: tuple[list[Any], list[Any]]) -> None:
    """Every stored row is kept, changed in its place, brought back or reported as cut."""
    stored, post = case
    before = json.dumps(stored)
    merge = merge_messages(stored, post)
    assert json.dumps(stored) == before
    assert merge.appended == merge.messages[merge.keep :]
    cut = {row["id"] for row in merge.cut}
    assert all(any(row is known for known in stored) for row in merge.cut)
    there = {row["id"] for row in merge.messages if "id" in row}
    assert {row["id"] for row in stored} == cut | ({row["id"] for row in stored} & there)
    assert not cut & there
    for place, row in enumerate(stored[: merge.keep]):
        now = merge.messages[place]
        assert now["id"] == row["id"]
        assert now is row or place >= merge.first_change
    if merge.first_change < merge.keep:
        assert merge.messages[merge.first_change] is not stored[merge.first_change]
    else:
        assert merge.first_change == merge.keep
    same = len(stored) == len(merge.messages) and all(
        a is b for a, b in zip(stored, merge.messages, strict=True)
    )
    assert (merge.kind == "continue") == same
    assert (merge.kind in ("regenerate", "edit")) == bool(merge.cut)


@SETTINGS
@given(posts())
def test_no_id_is_stored_twice_by_a_merge(case: tuple[list[Any], list[Any]]) -> None:
    stored, post = case
    names = [m["id"] for m in merge_messages(stored, post).messages if "id" in m]
    assert len(names) == len(set(names))


@SETTINGS
@given(posts())
def test_what_a_client_cannot_send_survives_every_post(case: tuple[list[Any], list[Any]]) -> None:
    """Calls, thinking, structured output, results, creation times and the bag."""
    stored, post = case
    now = {m["id"]: m for m in merge_messages(stored, post).messages if "id" in m}
    for row in stored:
        kept = now.get(row["id"])
        if kept is None:
            continue
        keys = ["role", "toolCalls", "thinking", "structuredOutput", "createdAt", "error"]
        for key in [*keys, *(["content"] if row["role"] == "tool" else [])]:
            assert kept.get(key) == row.get(key)
        bag = row.get("metadata", {}).get("tanstack")
        assert kept.get("metadata", {}).get("tanstack") == bag


@SETTINGS
@given(posts())
def test_merging_the_same_post_again_changes_nothing(case: tuple[list[Any], list[Any]]) -> None:
    """A retried request finds the thread as the first one left it."""
    stored, post = case
    first = ensure_ids(merge_messages(stored, post).messages)
    again = merge_messages(first, post)
    assert len(again.messages) == len(first)
    assert all(a is b for a, b in zip(again.messages, first, strict=True))
    assert again.kind == "continue"
