"""A posted history merged into the stored one: which rows stay, which fields change."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.messages import (
    Merge,
    ensure_ids,
    merge_messages,
    model_to_ui,
    model_to_wire,
    wire_to_model,
)

Row = dict[str, Any]


def user(name: str | None, content: Any = None, /, **more: Any) -> Any:
    row: Row = {"role": "user", "content": f"says {name}" if content is None else content, **more}
    return row if name is None else {"id": name, **row}


def says(name: str | None, content: Any = "", /, *calls: str, **more: Any) -> Any:
    row: Row = {"role": "assistant", "content": content or f"answer {name}", **more}
    if calls:
        row["toolCalls"] = [call(c) for c in calls]
        row["content"] = content or None
    return row if name is None else {"id": name, **row}


def call(name: str) -> Row:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def result(name: str | None, of: str, content: Any = "ok", /, **more: Any) -> Any:
    row: Row = {"role": "tool", "toolCallId": of, "content": content, **more}
    return row if name is None else {"id": name, **row}


def copies(rows: list[Any]) -> list[Any]:
    """The rows as a client that shows them posts them."""
    return wire_to_model(model_to_wire(rows)).messages


def ids(merge: Merge) -> list[Any]:
    return [m.get("id") for m in merge.messages]


def untouched(merge: Merge, stored: list[Any]) -> bool:
    """Every kept row is the stored object, and the merge says so."""
    kept = merge.messages[: merge.keep]
    same = all(a is b for a, b in zip(kept, stored, strict=False))
    return same and merge.first_change == merge.keep


ABC = [user("a"), says("b"), user("c"), says("d")]


# ------------------------------------------------------------- the table of the merge rules


def test_row_1_an_empty_post_goes_on_with_what_is_stored() -> None:
    merge = merge_messages(ABC, [])
    assert (merge.kind, merge.keep, merge.cut, merge.appended) == ("continue", 4, [], [])
    assert untouched(merge, ABC)
    assert merge.messages is not ABC


def test_row_2_an_empty_thread_takes_the_post_as_it_is() -> None:
    post = [user("a"), says("b"), user("c")]
    merge = merge_messages([], post)
    assert (merge.kind, merge.keep, merge.first_change) == ("append", 0, 0)
    assert all(a is b for a, b in zip(merge.messages, post, strict=True))


def test_row_3_with_no_known_id_all_stays_and_all_is_appended() -> None:
    merge = merge_messages(ABC, [user("x"), says("y"), user("z")])
    assert ids(merge) == ["a", "b", "c", "d", "x", "y", "z"]
    assert (merge.kind, merge.cut) == ("append", [])
    assert untouched(merge, ABC)


def test_row_4_up_to_the_last_stored_row_nothing_is_dropped() -> None:
    merge = merge_messages(ABC, copies(ABC))
    assert (merge.kind, merge.cut, merge.appended) == ("continue", [], [])
    assert untouched(merge, ABC)


def test_row_5_what_stands_behind_the_last_known_row_is_dropped() -> None:
    merge = merge_messages(ABC, copies(ABC[:3]))
    assert (merge.kind, merge.keep, ids(merge)) == ("regenerate", 3, ["a", "b", "c"])
    assert merge.cut == [ABC[3]]
    assert untouched(merge, ABC)


def test_row_5_a_paged_client_regenerates_with_one_row() -> None:
    merge = merge_messages(ABC, copies(ABC[2:3]))
    assert (merge.kind, ids(merge)) == ("regenerate", ["a", "b", "c"])


def test_row_5_a_new_question_behind_an_earlier_row_is_an_edit() -> None:
    merge = merge_messages(ABC, [*copies(ABC[:2]), user("x")])
    assert (merge.kind, ids(merge), merge.cut) == ("edit", ["a", "b", "x"], ABC[2:])


def test_row_5_the_same_question_with_other_words_is_an_edit() -> None:
    """Under its own id, with the answer cut: the user said something new."""
    merge = merge_messages(ABC, [*copies(ABC[:2]), user("c", "other words")])
    assert (merge.kind, merge.first_change, merge.keep) == ("edit", 2, 3)
    assert merge.messages[2] == user("c", "other words")
    assert merge.cut == ABC[3:]


def test_row_6_a_posted_user_row_wins_in_its_place() -> None:
    merge = merge_messages(ABC, [user("a", "edited"), *copies(ABC[1:])])
    assert (merge.kind, merge.first_change, merge.keep) == ("append", 0, 4)
    assert [m["content"] for m in merge.messages[:2]] == ["edited", "answer b"]
    assert merge.messages[1] is ABC[1]


def test_row_7_what_only_the_store_has_stays() -> None:
    stored = [user("a", midConversationChange={"k": 1})]
    merge = merge_messages(stored, [user("a", "edited")])
    assert merge.messages == [user("a", "edited", midConversationChange={"k": 1})]


def test_row_8_a_stored_row_without_an_id_is_left_alone() -> None:
    stored = [user("a"), says(None, "no id"), user("c")]
    merge = merge_messages(stored, [user("a"), user("c")])
    assert untouched(merge, stored)
    assert merge.kind == "continue"


def test_row_9_a_row_without_an_id_is_the_same_row_in_the_same_place() -> None:
    stored = [user(None, "hi"), says(None, "yo")]
    merge = merge_messages(stored, [user(None, "hi"), says(None, "yo"), user(None, "more")])
    assert [m["content"] for m in merge.messages] == ["hi", "yo", "more"]
    assert untouched(merge, stored)
    single = merge_messages(stored, [user(None, "hi"), user(None, "more")])
    assert [m["content"] for m in single.messages] == ["hi", "yo", "more"]


def test_row_10_so_is_one_whose_content_is_a_list() -> None:
    """Equal by structure; upstream compares by identity and appends it again."""
    parts = [{"type": "text", "content": "x"}, {"type": "image", "source": {"type": "url"}}]
    stored = [user(None, [dict(p) for p in parts])]
    merge = merge_messages(stored, [user(None, [dict(p) for p in parts])])
    assert merge.kind == "continue"


def test_row_11_a_new_row_between_known_ones_goes_to_the_end() -> None:
    merge = merge_messages(ABC, [user("a"), user("new"), *copies(ABC[1:])])
    assert ids(merge) == ["a", "b", "c", "d", "new"]


def test_row_12_a_client_cannot_delete_a_row_in_the_middle() -> None:
    merge = merge_messages(ABC, [user("a"), says("d")])
    assert (ids(merge), merge.kind) == (["a", "b", "c", "d"], "continue")


def test_row_13_reversed_rows_come_back_at_the_end_with_all_they_had() -> None:
    """The cutoff follows the last known row; one behind it returns as it is stored."""
    stored = [user("a"), says("b"), says("c", "deep", thinking=[{"content": "hm"}])]
    merge = merge_messages(stored, [says("c", "deep"), user("a")])
    assert ids(merge) == ["a", "c"]
    assert merge.messages[1] is stored[2]
    assert merge.cut == [stored[1]]
    assert merge.keep == 1


def test_row_13_a_message_that_comes_back_brings_its_results_along() -> None:
    """Whatever the order of the post: a result never stands before its call."""
    stored = [user("a"), user("b"), says("c", "", "c1"), result("t", "c1"), user("d")]
    for post in ([says("c", "", "c1"), user("b")], [result(None, "c1"), user("b")]):
        merge = merge_messages(stored, post)
        assert ids(merge) == ["a", "b", "c", "t"]
        assert merge.cut == [stored[4]]
        assert merge.keep == 4


def test_row_14_a_new_row_twice_in_one_post_is_stored_once() -> None:
    """Upstream appends it twice; the later copy counts, in the place of the first."""
    merge = merge_messages(ABC, [user("x", "one"), says("y"), user("x", "two")])
    assert ids(merge) == ["a", "b", "c", "d", "x", "y"]
    assert merge.messages[4]["content"] == "two"


def test_row_15_of_a_known_row_twice_the_last_copy_counts() -> None:
    merge = merge_messages(ABC, [user("a", "one"), user("a", "two"), *copies(ABC[1:])])
    assert [m["content"] for m in merge.messages] == ["two", *[m["content"] for m in ABC[1:]]]


def test_row_16_of_two_stored_rows_with_one_id_far_apart_the_first_decides() -> None:
    stored = [user("a"), says("x", "one"), user("b"), says("x", "two")]
    merge = merge_messages(stored, [user("a"), says("x", "one")])
    assert (merge.keep, merge.kind) == (2, "regenerate")


def test_row_17_an_empty_id_is_no_id() -> None:
    post = wire_to_model([{"id": "", "role": "user", "content": "q"}]).messages
    merge = merge_messages(ABC, post)
    assert merge.kind == "append"
    assert "id" not in merge.appended[0]


def test_row_18_new_ids_for_the_whole_history_are_appended_unless_content_is_compared() -> None:
    post = [user("a2", "says a"), says("b2", "answer b"), user("new")]
    stored = [user("a"), says("b")]
    assert ids(merge_messages(stored, post)) == ["a", "b", "a2", "b2", "new"]
    assert ids(merge_messages(stored, post, match_content=True)) == ["a", "b", "new"]


def test_row_20_a_result_behind_the_known_rows_is_appended() -> None:
    stored = [user("a"), says("b", "", "c1")]
    merge = merge_messages(stored, [*copies(stored), result(None, "c1", "42")])
    assert merge.appended == [result(None, "c1", "42")]
    assert (merge.kind, merge.cut) == ("append", [])


def test_forty_messages_and_every_way_to_post_them() -> None:
    """New turn, overlap, regenerate, continue and an edited row far back."""
    stored: list[Any] = []
    for i in range(20):
        stored += [user(f"m{2 * i + 1}"), says(f"m{2 * i + 2}")]
    assert len(merge_messages(stored, [user("m41")]).messages) == 41
    assert len(merge_messages(stored, [*copies(stored[38:]), user("m41")]).messages) == 41
    again = merge_messages(stored, copies(stored[38:39]))
    assert ids(again) == [f"m{i}" for i in range(1, 40)]
    assert len(merge_messages(stored, []).messages) == 40
    edited = merge_messages(stored, [user("m1"), user("m3", "edited")])
    assert edited.messages == [stored[0], stored[1], user("m3", "edited")]
    assert len(edited.cut) == 37


# --------------------------------------------------------------- what a client posts, and when

TOOLS = [
    user("u1"),
    says("a1", "", "c1", "c2"),
    result("t1", "c1", '{"n":1}', createdAt="2026-11-30T12:00:00.000Z"),
    result("t2", "c2", '{"error":"E"}', error="E"),
    says("a2", "done"),
]


def lossy(rows: list[Any]) -> list[Any]:
    """As the browser posts what it streamed: results have no id, all text in one piece."""
    wire = model_to_wire(rows)
    for row in wire:
        if row["role"] == "tool":
            row["id"] = f"tool-{row['toolCallId']}"
            row["metadata"] = {"tanstack": {"toolResult": {}}}
        elif "metadata" in row:
            row["metadata"]["tanstack"].pop("structuredOutput", None)
    return wire_to_model(wire).messages


def test_a_new_turn_posts_all_that_is_shown() -> None:
    merge = merge_messages(TOOLS, [*lossy(TOOLS), user("u2")])
    assert (merge.kind, merge.cut, merge.appended) == ("append", [], [user("u2")])
    assert untouched(merge, TOOLS)


def test_a_new_turn_of_a_paged_client_posts_one_row() -> None:
    merge = merge_messages(TOOLS, [user("u2")])
    assert (merge.kind, merge.appended) == ("append", [user("u2")])
    assert untouched(merge, TOOLS)


def test_sending_before_the_thread_was_hydrated_keeps_the_thread() -> None:
    assert len(merge_messages(TOOLS, [user("first")]).messages) == 6


def test_a_regenerate_posts_up_to_the_last_question() -> None:
    merge = merge_messages(TOOLS, lossy(TOOLS[:1]))
    assert (merge.kind, merge.keep, merge.cut) == ("regenerate", 1, TOOLS[1:])


def test_a_paged_resume_posts_from_the_last_question_through_the_open_call() -> None:
    stored = [*ABC, user("u1"), says("a1", "", "c1")]
    merge = merge_messages(stored, lossy(stored[4:]), pending_tool_calls={"c1"})
    assert merge.kind == "continue"
    assert untouched(merge, stored)


APPROVED = '{"approved":true,"pendingExecution":true,"message":"User approved this action"}'
DENIED = '{"approved":false,"message":"User denied this action"}'
PAUSED = [user("u1"), says("a1", "", "c1")]


@pytest.mark.parametrize(
    "answer",
    [
        result(None, "c1", APPROVED),
        result(None, "c1", DENIED),
        result(None, "c1", '{"city":"Berlin"}'),
        result(None, "c1", "null", error="permission denied"),
        result("tool-row", "c1", '{"error":"a success that looks like a failure"}'),
    ],
    ids=["approved", "denied", "client tool", "failed client tool", "lookalike"],
)
def test_a_result_posted_for_a_call_that_waits_is_no_answer(answer: Row) -> None:
    """The resume batch is; the paused thread stays as it is."""
    merge = merge_messages(PAUSED, [*lossy(PAUSED), answer], pending_tool_calls={"c1"})  # type: ignore[list-item]
    assert merge.kind == "continue"
    assert untouched(merge, PAUSED)


def test_a_placeholder_is_never_a_result() -> None:
    """Also without an interrupt store."""
    merge = merge_messages(PAUSED, [*lossy(PAUSED), result(None, "c1", APPROVED)])
    assert merge.kind == "continue"


def test_without_an_interrupt_store_posted_results_count() -> None:
    merge = merge_messages(PAUSED, [*lossy(PAUSED), result(None, "c1", DENIED)])
    assert merge.appended == [result(None, "c1", DENIED)]


def test_a_partial_answer_after_stop_is_kept_when_nothing_is_stored() -> None:
    merge = merge_messages([user("u1")], [user("u1"), says("a1", "par"), user("u2")])
    assert ids(merge) == ["u1", "a1", "u2"]


def test_a_partial_answer_never_shortens_the_stored_one() -> None:
    stored = [user("u1"), says("a1", "partial and the rest")]
    merge = merge_messages(stored, [user("u1"), says("a1", "partial"), user("u2")])
    assert merge.messages[1] is stored[1]


def test_a_partial_answer_that_shows_more_than_the_last_draft_is_taken() -> None:
    """A run was stopped: the store has its last draft, the viewer saw more."""
    bag = {"tanstack": {"stopReason": "aborted"}}
    stored = [user("u1"), says("a1", "Hello wor", metadata=bag)]
    merge = merge_messages(stored, [user("u1"), says("a1", "Hello world"), user("u2")])
    assert merge.messages[1] == says("a1", "Hello world", metadata=bag)


def test_the_empty_assistant_of_a_failed_run_is_dropped() -> None:
    empty: Any = {"id": "made-up", "role": "assistant", "content": None}
    merge = merge_messages([user("u1")], [user("u1"), empty, user("u2")])
    assert ids(merge) == ["u1", "u2"]


def test_an_activity_on_screen_comes_back_as_nothing() -> None:
    empty: Any = {"id": "act", "role": "assistant", "content": None}
    told: Any = {"id": "act", "role": "assistant", "content": "{}"}
    for copy in (empty, told):
        post = [*lossy(TOOLS), copy, user("u2")]
        merge = merge_messages(TOOLS, post, activity_ids={"act"})
        assert merge.appended == [user("u2")]


def test_a_stored_assistant_that_a_client_shows_empty_is_still_the_cutoff() -> None:
    """A message of thoughts only has no text to post."""
    stored = [user("u1"), says("a1", None, thinking=[{"content": "hm"}]), user("u2"), says("a2")]
    stored[1]["content"] = None
    empty: Any = {"id": "a1", "role": "assistant", "content": None}
    merge = merge_messages(stored, [user("u1"), empty])
    assert (merge.keep, merge.kind) == (2, "regenerate")


def test_a_reload_while_paused_cuts_the_open_call() -> None:
    merge = merge_messages(PAUSED, lossy(PAUSED[:1]))
    assert (merge.kind, merge.cut) == ("regenerate", PAUSED[1:])


def test_results_behind_the_cutoff_message_stay() -> None:
    """They carry no usable id, and the client may not have seen them."""
    merge = merge_messages(TOOLS[:4], lossy(TOOLS[:2]))
    assert (merge.kind, merge.keep) == ("continue", 4)
    stale = merge_messages(TOOLS, [*lossy(TOOLS[:3]), user("u2")])
    assert (stale.keep, stale.cut) == (4, TOOLS[4:])


def test_results_posted_in_another_order_are_the_same_results() -> None:
    post = lossy(TOOLS[:4])
    merge = merge_messages(TOOLS[:4], [*post[:2], post[3], post[2]])
    assert merge.kind == "continue"


def test_a_call_id_used_again_in_a_later_turn_is_another_call() -> None:
    """Some providers count from zero in every turn."""
    first = [user("u1"), says("a1", "", "call_0"), result("t1", "call_0", "one"), says("a2")]
    second = [*first, user("u2"), says("a3", "", "call_0")]
    merge = merge_messages(second, [*lossy(second), result(None, "call_0", "two")])
    assert merge.appended == [result(None, "call_0", "two")]
    done = [*second, result("t2", "call_0", "two"), says("a4")]
    again = merge_messages(done, lossy(done))
    assert again.kind == "continue"
    assert untouched(again, done)


def test_results_of_two_new_turns_that_share_a_call_id_are_both_kept() -> None:
    post = [
        user("u1"), says("a1", "", "call_0"), result(None, "call_0", "one"),
        user("u2"), says("a2", "", "call_0"), result(None, "call_0", "two"),
    ]  # fmt: skip
    merge = merge_messages([], post)
    assert [m["content"] for m in merge.messages if m["role"] == "tool"] == ["one", "two"]


def test_a_new_result_twice_in_one_post_is_stored_once() -> None:
    post = [*lossy(PAUSED), result(None, "c1", "one"), result("other", "c1", "two")]
    assert merge_messages(PAUSED, post).appended == [result("other", "c1", "two")]


def test_segments_of_one_message_are_one_row_to_the_client() -> None:
    """The cutoff takes them all, and their joined text is no edit."""
    stored = [
        user("u1"),
        says("a1", "one ", "c1"),
        result("t1", "c1"),
        says("a1", "two"),
    ]
    merge = merge_messages(stored, [*lossy(stored), user("u2")])
    assert (merge.cut, merge.appended) == ([], [user("u2")])
    assert untouched(merge, stored)


def test_new_segments_that_share_an_id_are_all_stored() -> None:
    post = [user("u"), says("a", "one ", "c1"), result("t", "c1"), says("a", "two")]
    assert merge_messages([], post).messages == post


def test_a_standalone_result_shown_as_a_message_of_its_own_is_recognised() -> None:
    """A result without its call is painted as an assistant message with the row's id."""
    stored = [user("u1"), result("t1", "gone"), says("a1")]
    post = [
        user("u1"),
        {"id": "t1", "role": "assistant", "content": None},
        result(None, "gone"),
        says("a1"),
        user("u2"),
    ]
    merge = merge_messages(stored, post)  # type: ignore[arg-type]
    assert merge.appended == [user("u2")]
    assert untouched(merge, stored)


def test_a_row_under_the_id_of_a_row_with_another_role_changes_nothing() -> None:
    merge = merge_messages(ABC, [user("b", "I am the assistant"), *copies(ABC[2:])])
    assert untouched(merge, ABC)
    assert merge.kind == "continue"


# --------------------------------------------------------------------- fields of a known row

RICH = says(
    "a1",
    '{"name":"Ada"}',
    "c1",
    thinking=[{"id": "r1", "content": "hm", "signature": "S"}],
    structuredOutput={
        "type": "structured-output",
        "status": "complete",
        "raw": '{"name":"Ada"}',
        "data": {"name": "Ada"},
    },
    createdAt="2026-11-30T12:00:00.000Z",
    name="writer",
    metadata={"mine": 1, "tanstack": {"uiResources": [{"x": 1}], "run": {"id": "r"}}},
    future=[1],
)


@pytest.mark.parametrize(
    "copy",
    [
        says("a1", '{"name":"Ada"}', "c1"),
        says("a1", '{"name":"Ada"}'),
        says("a1", '{"na'),
        says("a1", '{"name":"Ada"}', "c1", metadata={"tanstack": {"model": "m", "run": {}}}),
        says("a1", '{"name":"Ada"}', "c1", createdAt="2027-01-01T00:00:00.000Z"),
        says("a1", '{"name":"Ada"}', "c1", thinking=[{"id": "x", "content": "other"}]),
        says("a1", '{"name":"Ada"}', "other", name="other", future=[2]),
        {"id": "a1", "role": "assistant", "content": None},
        says("a1", [{"type": "text", "content": '{"name":"Ada"}'}]),
    ],
    ids=["plain", "no calls", "beginning", "bag", "time", "thinking", "calls", "empty", "parts"],
)
def test_what_a_client_cannot_send_is_not_wiped(copy: Row) -> None:
    """Structured output, thinking and signatures, calls, creation time, widgets, the bag and
    unknown keys: the stored object itself comes back."""
    merge = merge_messages([user("u"), RICH], [user("u"), copy])  # type: ignore[list-item]
    assert merge.messages[1] is RICH
    assert merge.kind == "continue"


def test_prose_beside_a_structured_part_is_posted_with_the_raw_behind_it() -> None:
    stored = says("a", "prose", structuredOutput={"status": "complete", "raw": "{}", "data": {}})
    for text in ("prose{}", "prose"):
        assert merge_messages([stored], [says("a", text)]).messages[0] is stored


def test_a_broken_structured_part_is_posted_without_its_raw() -> None:
    stored = says("a", 'prose{"x', structuredOutput={"status": "error", "raw": '{"x'})
    for text in ("prose", 'prose{"x'):
        assert merge_messages([stored], [says("a", text)]).messages[0] is stored


def test_an_edited_answer_changes_its_text_and_nothing_else() -> None:
    merge = merge_messages([user("u"), RICH], [user("u"), says("a1", "better")])
    assert merge.messages[1] == {**RICH, "content": "better"}
    assert (merge.first_change, merge.kind) == (1, "append")


def test_an_edited_answer_keeps_its_media() -> None:
    image = {"type": "image", "source": {"type": "url", "value": "x"}}
    stored = says("a", [{"type": "text", "content": "old"}, image])
    merge = merge_messages([stored], [says("a", "new")])
    assert merge.messages[0]["content"] == [{"type": "text", "content": "new"}, image]


def test_user_metadata_of_any_row_may_change_key_by_key() -> None:
    """A key that the copy lacks stays; the bag is the server's."""
    posted = {"mine": 2, "more": 3, "tanstack": {"run": {"id": "forged"}}}
    merge = merge_messages([RICH], [says("a1", '{"name":"Ada"}', metadata=posted)])
    assert merge.messages[0] == {
        **RICH,
        "metadata": {"mine": 2, "more": 3, "tanstack": RICH["metadata"]["tanstack"]},
    }
    kept = merge_messages([RICH], [says("a1", '{"name":"Ada"}', metadata={"mine": 1})])
    assert kept.messages[0] is RICH


def test_a_user_row_may_change_content_name_metadata_and_unknown_keys() -> None:
    stored = user("u", "old", name="bob", createdAt="2026-11-30T12:00:00.000Z", metadata={"k": 1})
    merge = merge_messages(
        [stored], [user("u", "new", name="eve", createdAt="2027", metadata={"l": 2}, future=1)]
    )
    assert merge.messages == [
        user(
            "u",
            "new",
            name="eve",
            createdAt="2026-11-30T12:00:00.000Z",
            metadata={"k": 1, "l": 2},
            future=1,
        )
    ]


def test_a_user_row_whose_text_parts_are_posted_joined_did_not_change() -> None:
    stored = user("u", [{"type": "text", "content": "a"}, {"type": "text", "content": "b"}])
    assert merge_messages([stored], [user("u", "ab")]).messages[0] is stored


WEATHER = {"type": "text", "content": "Look: ", "lang": "en"}
PHOTO = {
    "type": "image",
    "source": {"type": "url", "value": "https://a.test/p.png", "etag": "7"},
    "alt": "a cat",
}


@pytest.mark.parametrize(
    ("stored", "posted"),
    [
        ([WEATHER], "Look: "),
        (
            [WEATHER, PHOTO],
            [
                {"type": "text", "content": "Look: "},
                {"type": "image", "source": {"type": "url", "value": "https://a.test/p.png"}},
            ],
        ),
    ],
)
def test_keys_of_a_part_that_a_client_does_not_know_stay(stored: Any, posted: Any) -> None:
    thread: list[Any] = [{"id": "u", "role": "user", "content": stored}]
    merge = merge_messages(thread, [{"id": "u", "role": "user", "content": posted}])
    assert merge.kind == "continue"
    assert merge.messages[0] is thread[0]


def test_of_an_edited_content_the_parts_that_did_not_change_keep_their_keys() -> None:
    thread: list[Any] = [{"id": "u", "role": "user", "content": [WEATHER, PHOTO]}]
    other = {"type": "image", "source": {"type": "url", "value": "https://a.test/q.png"}}
    post: list[Any] = [
        {"id": "u", "role": "user", "content": [{"type": "text", "content": "Look: "}, other]}
    ]
    assert merge_messages(thread, post).messages[0].get("content") == [WEATHER, other]
    shorter: list[Any] = [{"id": "u", "role": "user", "content": "Look: "}]
    assert merge_messages(thread, shorter).messages[0].get("content") == "Look: "
    annotated: list[Any] = [{"id": "u", "role": "user", "content": [{**WEATHER, "lang": "de"}]}]
    assert merge_messages(thread, annotated).messages[0].get("content") == [
        {**WEATHER, "lang": "de"}
    ]


def test_a_stored_result_is_never_changed_by_a_post() -> None:
    stored = [*PAUSED, result("t1", "c1", [{"type": "text", "content": "q"}], error="E", name="f")]
    post = [*lossy(PAUSED), result(None, "c1", "other", createdAt="2027-01-01T00:00:00.000Z")]
    merge = merge_messages(stored, post)
    assert untouched(merge, stored)
    assert merge.kind == "continue"


def test_a_stored_placeholder_gives_way_to_a_result() -> None:
    stored = [*PAUSED, result("t1", "c1", APPROVED, name="f")]
    merge = merge_messages(stored, [*lossy(PAUSED), result(None, "c1", "42")])
    assert merge.messages[2] == result("t1", "c1", "42", name="f")
    assert merge.first_change == 2
    waiting = merge_messages(
        stored, [*lossy(PAUSED), result(None, "c1", "42")], pending_tool_calls={"c1"}
    )
    assert waiting.kind == "continue"


def test_the_stored_rows_are_not_changed_in_place() -> None:
    stored = [user("u", "old", metadata={"k": 1}), RICH]
    before = repr(stored)
    merge_messages(
        stored, [user("u", "new", metadata={"k": 2}), says("a1", "x", metadata={"mine": 5})]
    )
    assert repr(stored) == before


# ---------------------------------------------------------------------- rows without usable ids

TURN = [user("u1", "hi"), says("a1", "yo"), user("u2", "more"), says("a2", "ok")]


def anonymous(rows: list[Any]) -> list[Any]:
    return [{k: v for k, v in row.items() if k != "id"} for row in rows]


def test_a_whole_history_without_ids_is_not_stored_again() -> None:
    merge = merge_messages(TURN, [*anonymous(TURN), user(None, "next")])
    assert untouched(merge, TURN)
    assert merge.appended == [user(None, "next")]


def test_the_same_post_without_ids_again_and_again_grows_nothing() -> None:
    stored: list[Any] = []
    for question in ("one", "two", "three"):
        post = [*anonymous(stored), user(None, question)]
        for _ in range(3):  # the request is retried
            stored = ensure_ids(merge_messages(stored, post).messages)
        stored = [*stored, *ensure_ids([says(None, f"to {question}")])]
    assert [m["content"] for m in stored] == [
        "one", "to one", "two", "to two", "three", "to three",
    ]  # fmt: skip


def test_one_row_without_an_id_is_a_new_turn_though_an_old_one_had_its_words() -> None:
    merge = merge_messages(TURN, [user(None, "hi")])
    assert merge.appended == [user(None, "hi")]


def test_one_row_without_an_id_that_repeats_the_unanswered_question_is_a_retry() -> None:
    stored = [*TURN, user("u3", "again")]
    assert merge_messages(stored, [user(None, "again")]).kind == "continue"


def test_a_row_without_an_id_behind_known_ones_is_the_stored_row_there() -> None:
    stored = [*TURN, user("u3", "again")]
    merge = merge_messages(stored, [*TURN, user(None, "again")])
    assert merge.kind == "continue"
    other = merge_messages(stored, [*TURN, user(None, "something else")])
    assert (other.kind, other.cut) == ("edit", [stored[-1]])


def test_a_row_without_an_id_behind_a_new_one_is_new() -> None:
    """Though the stored row behind the last known one has its words."""
    stored = [user("u1", "hi"), user("u2", "hi")]
    post = [user("u1", "hi"), user("u2", "hi"), user("u3", "hi"), user(None, "hi")]
    assert [m.get("id") for m in merge_messages(stored, post).appended] == ["u3", None]
    shorter = [user("u1", "hi"), user("u3", "hi"), user(None, "hi")]
    assert [m.get("id") for m in merge_messages(stored, shorter).messages] == ["u1", "u3", None]


# ------------------------------------------------------------------------------------- cost


@pytest.mark.timeout(30)  # what grows with the square takes minutes
def test_a_full_post_of_five_thousand_rows_is_merged_in_one_pass() -> None:
    """Work grows with the number of rows, also when a client reverses them all."""
    stored: list[Any] = []
    for i in range(1250):
        stored += [
            user(f"u{i}"),
            says(f"a{i}", "", f"c{i}"),
            result(f"t{i}", f"c{i}"),
            says(f"b{i}"),
        ]
    post = lossy(stored)
    assert merge_messages(stored, post).kind == "continue"
    assert len(merge_messages(stored, list(reversed(post))).messages) == len(stored)
    assert len(model_to_ui(stored)) == 3750


@pytest.mark.timeout(30)  # what grows with the square takes minutes
def test_many_results_and_segments_of_one_message_are_merged_in_one_pass() -> None:
    stored: list[Any] = [user("u")]
    for i in range(2500):
        stored += [says("a", f"{i} ", f"c{i}"), result(f"t{i}", f"c{i}")]
    assert merge_messages(stored, lossy(stored)).kind == "continue"
    assert merge_messages(stored, anonymous(stored)).kind == "continue"
