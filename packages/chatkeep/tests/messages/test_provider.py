"""What a model is sent, and that the stored history is left alone."""

from __future__ import annotations

from typing import Any

from chatkeep.messages import NO_RESULT, provider_view


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}, **more}


def assistant(name: str, content: Any = None, *calls: Any, **more: Any) -> Any:
    row: dict[str, Any] = {"id": name, "role": "assistant", "content": content, **more}
    if calls:
        row["toolCalls"] = [call(c) if isinstance(c, str) else c for c in calls]
    return row


def result(of: str, content: str = "ok", **more: Any) -> Any:
    return {"id": f"t-{of}", "role": "tool", "toolCallId": of, "content": content, **more}


USER: Any = {"id": "u", "role": "user", "content": "x"}
GOOD = [USER, assistant("a", "hm", "c1", "c2"), result("c2"), result("c1"), assistant("b", "done")]


def shape(rows: list[Any]) -> list[str]:
    return [r.get("toolCallId") or r["id"] for r in rows]


def test_a_sound_history_is_sent_as_it_is() -> None:
    """Every row by identity, results in their stored order."""
    view = provider_view(GOOD)
    assert all(a is b for a, b in zip(view, GOOD, strict=True))
    assert view is not GOOD


def test_a_call_without_a_result_gets_a_failed_one_in_its_place() -> None:
    rows = [USER, assistant("a", None, "c1", "c2"), result("c2"), USER]
    view = provider_view(rows)
    assert shape(view) == ["u", "a", "c2", "c1", "u"]
    assert view[3] == {
        "role": "tool",
        "toolCallId": "c1",
        "content": '{"error":"No result was provided for this tool call"}',
        "error": NO_RESULT,
    }


def test_a_call_that_the_provider_ran_needs_no_result() -> None:
    rows = [assistant("a", "x", call("c", metadata={"providerExecuted": True}))]
    assert provider_view(rows) == rows


def test_a_result_stands_behind_its_call_wherever_it_was_stored() -> None:
    rows = [assistant("a", None, "c1"), USER, assistant("b", "y"), result("c1")]
    assert shape(provider_view(rows)) == ["a", "c1", "u", "b"]


def test_of_several_results_of_a_call_the_newest_is_sent() -> None:
    rows = [assistant("a", None, "c1"), result("c1", "old"), result("c1", "new")]
    view = provider_view(rows)
    assert [m.get("content") for m in view] == [None, "new"]


def test_a_placeholder_is_no_result() -> None:
    rows = [assistant("a", None, "c1"), result("c1", '{"pendingExecution":true}')]
    assert provider_view(rows)[1]["error"] == NO_RESULT


def test_a_result_without_a_call_is_not_sent() -> None:
    assert shape(provider_view([USER, result("gone"), assistant("a", "x")])) == ["u", "a"]


def test_partial_rows_of_failed_runs_are_not_sent_nor_are_their_results() -> None:
    for reason in ("error", "aborted"):
        failed = assistant("f", "par", "c9", metadata={"tanstack": {"stopReason": reason}})
        view = provider_view([USER, failed, result("c9"), *GOOD])
        assert shape(view) == ["u", *shape(GOOD)]


def test_an_unknown_stop_reason_hides_nothing() -> None:
    rows = [assistant("a", "x", metadata={"tanstack": {"stopReason": "length"}})]
    assert provider_view(rows) == rows


def test_empty_assistant_rows_are_not_sent() -> None:
    assert provider_view([USER, assistant("a"), assistant("b", "")]) == [USER]


def test_adjacent_segments_share_one_set_of_calls() -> None:
    rows = [assistant("a", "x", "c1"), assistant("a", None, "c2"), result("c2"), USER]
    view = provider_view(rows)
    assert shape(view) == ["a", "a", "c2", "c1", "u"]
    assert view[3]["error"] == NO_RESULT


def test_a_call_id_used_again_is_answered_in_its_own_turn() -> None:
    rows = [assistant("a", None, "c"), USER, assistant("b", None, "c"), result("c", "two")]
    view = provider_view(rows)
    assert [m.get("error") for m in view] == [None, NO_RESULT, None, None, None]


def test_thoughts_of_another_model_lose_their_signatures() -> None:
    mine = {"provider": "p", "api": "x", "model": "m"}
    other = {"provider": "q", "api": "x", "model": "m"}
    thinking = [
        {"content": "aloud", "signature": "S"},
        {"content": "secret", "signature": "S", "redacted": True},
    ]
    signed = call("c", metadata={"thoughtSignature": "TS", "k": 1})
    foreign = assistant(
        "a", "so", signed, thinking=thinking, metadata={"tanstack": {"source": other}}
    )
    own = assistant("b", "so", thinking=thinking, metadata={"tanstack": {"source": mine}})
    unknown = assistant("c", "so", thinking=thinking)
    view = provider_view([foreign, result("c"), own, unknown], source=mine)
    assert "thinking" not in view[0]
    assert view[0]["content"] == "aloud\n\nso"
    assert view[0]["toolCalls"] == [call("c", metadata={"k": 1})]
    assert view[2] is own
    assert view[3] is unknown
    assert provider_view([foreign, result("c")])[0] is foreign


def test_the_stored_rows_are_not_changed() -> None:
    rows = [*GOOD, assistant("z", None, "c7"), result("gone")]
    before = repr(rows)
    provider_view(rows, source={"provider": "p"})
    assert repr(rows) == before
