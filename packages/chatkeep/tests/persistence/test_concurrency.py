"""Several writers on one thread: every turn stays, whole and in its order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

from chatkeep.stores import TurnCommit

pytestmark = pytest.mark.anyio

BACKENDS = ("memory", "sqlite", "psycopg", "asyncpg")


async def test_two_turns_at_once_are_both_kept_in_20_of_20_rounds(lab: Any, kit: Any) -> None:
    for number in range(20):
        lab.thread_id = f"t{number}"
        await lab.fill(kit.user("m1"), kit.assistant("m2"))
        history = (kit.user("m1"), kit.assistant("m2"))
        both = await asyncio.gather(
            lab.turn(*history, kit.user("uA", "SCENARIO:server-tool"), run_id=f"A{number}"),
            lab.turn(*history, kit.user("uB", "SCENARIO:server-tool"), run_id=f"B{number}"),
        )
        for events in both:
            assert isinstance(kit.terminal(events), RunFinishedEvent)
        rows = await lab.stored()
        assert [m["role"] for m in rows] == [
            "user",
            "assistant",
            *("user", "assistant", "tool", "assistant") * 2,
        ]
        for question in (2, 6):
            owner = rows[question]["id"][1:] + str(number)
            answers = [rows[question + 1], rows[question + 3]]
            assert [m["metadata"]["tanstack"]["run"]["id"] for m in answers] == [owner, owner]
            call = rows[question + 1]["toolCalls"][0]["id"]
            assert rows[question + 2]["toolCallId"] == call
        assert await lab.persistence.stores.messages.list_cuts(lab.thread_id) == []


async def test_two_first_turns_of_a_thread_are_both_kept(lab: Any, kit: Any) -> None:
    await asyncio.gather(lab.turn(kit.user("uA")), lab.turn(kit.user("uB")))
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant"] * 2


async def test_an_answer_goes_behind_its_own_question(lab: Any, kit: Any) -> None:
    first, second = kit.Paced(), kit.Paced()
    a = lab.start(kit.user("uA"), adapter=first)
    await first.began.wait()
    b = lab.start(kit.user("uB"), adapter=second)
    await second.began.wait()
    first.go.set()
    await a
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "user"]
    assert (await lab.ids())[2] == "uB"
    second.go.set()
    await b
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant"] * 2
    assert (await lab.run("r1")).status == (await lab.run("r2")).status == "completed"


async def test_ten_tabs_on_one_thread_lose_nothing(lab: Any, kit: Any) -> None:
    await asyncio.gather(*(lab.turn(kit.user(f"u{i}")) for i in range(10)))
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant"] * 10
    assert {rows[i]["id"] for i in range(0, 20, 2)} == {f"u{i}" for i in range(10)}


async def test_what_a_run_has_seen_does_not_include_the_turn_of_another_tab(
    lab: Any, kit: Any
) -> None:
    first, second = kit.Paced(), kit.Paced()
    a = lab.start(kit.user("uA"), adapter=first)
    await first.began.wait()
    b = lab.start(kit.user("uB"), adapter=second)
    await second.began.wait()
    first.go.set()
    seen = kit.terminal(await a).metadata["chatkeep"]["seen"]
    second.go.set()
    await b
    before = await lab.stored()
    events = await lab.turn(kit.user("uA"), seen=seen)
    assert kit.terminal(events).code == "unseen-messages"
    assert await lab.stored() == before


async def test_the_answer_to_a_question_that_was_cut_meanwhile_goes_to_its_cut(
    lab: Any, kit: Any
) -> None:
    await lab.fill(kit.user("m1"), kit.assistant("m2"))
    middleware = lab.middleware()
    slow = kit.Paced()
    a = lab.start(
        kit.user("m1"), kit.assistant("m2"), kit.user("uA"), adapter=slow, middleware=middleware
    )
    await slow.began.wait()
    transcript = await lab.persistence.stores.messages.load_transcript("t1")
    await lab.turn(kit.user("m1"), kit.assistant("m2"), kit.user("uB"), seen=transcript.numbers[-1])
    slow.go.set()
    assert isinstance(kit.terminal(await a), RunFinishedEvent)
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"] * 2
    assert "uA" not in await lab.ids()
    messages = lab.persistence.stores.messages
    (cut,) = await messages.list_cuts("t1")
    kept = await messages.load_cut("t1", cut.cut_id)
    assert [m["content"] for m in kept] == ["hello", "one two"]
    run = await lab.run("r1")
    assert (run.status, run.detached) == ("completed", True)
    assert middleware.counters["detached"] == 1


async def test_a_turn_that_began_while_the_post_was_on_its_way_is_not_cut(
    lab: Any, kit: Any
) -> None:
    await lab.fill(kit.user("m1"), kit.assistant("m2"))
    history = (kit.user("m1"), kit.assistant("m2"))
    slow = kit.Paced()
    a = lab.start(*history, kit.user("uA"), adapter=slow)
    await slow.began.wait()
    await lab.turn(*history, kit.user("uB"))
    slow.go.set()
    await a
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant"] * 3
    assert (rows[2]["id"], rows[4]["id"]) == ("uA", "uB")
    assert [m["content"] for m in rows[3:4]] == ["one two"]
    assert await lab.persistence.stores.messages.list_cuts("t1") == []


async def test_a_regenerate_leaves_a_turn_that_another_tab_has_just_begun(
    lab: Any, kit: Any
) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("old"))
    slow = kit.Paced()
    other = lab.start(kit.user("u1"), kit.assistant("old"), kit.user("u2"), adapter=slow)
    await slow.began.wait()
    await lab.turn(kit.user("u1"))
    slow.go.set()
    await other
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant"] * 2
    assert (rows[0]["id"], rows[2]["id"]) == ("u1", "u2")
    assert "old" not in await lab.ids()
    assert rows[3]["content"] == "one two"


async def test_an_edit_after_a_stop_cuts_the_question_it_replaces(
    lab: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops an answer, rewrites the question and sends it takes longer than a post."""
    monkeypatch.setattr("chatkeep.persistence.concurrent.ON_ITS_WAY_MS", -1)
    await lab.fill(kit.user("m1"), kit.assistant("m2"))
    history = (kit.user("m1"), kit.assistant("m2"))
    slow = kit.Paced()
    a = lab.start(*history, kit.user("uA"), adapter=slow)
    await slow.began.wait()
    await lab.turn(*history, kit.user("uA2"))
    slow.go.set()
    await a
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"] * 2
    assert (await lab.ids())[2] == "uA2"


async def test_a_thread_that_was_deleted_meanwhile_stays_deleted(lab: Any, kit: Any) -> None:
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    await lab.persistence.stores.messages.backend.delete_thread("t1")
    model.go.set()
    assert isinstance(kit.terminal(await task), RunErrorEvent)
    assert await lab.stored() == []
    assert await lab.run("r1") is None


async def test_a_question_that_was_erased_meanwhile_brings_back_no_answer(
    lab: Any, kit: Any
) -> None:
    await lab.fill(kit.user("m1"), kit.assistant("m2"))
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    await lab.persistence.stores.messages.backend.erase_messages("t1", ["u1"])
    model.go.set()
    assert isinstance(kit.terminal(await task), RunErrorEvent)
    assert await lab.ids() == ["m1", "m2"]
    assert (await lab.run("r1")).status == "failed"


async def test_a_regenerate_replaces_only_the_answer_it_saw(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("old"))
    model = kit.Paced()
    again = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    await lab.turn(kit.user("u2"))
    model.go.set()
    await again
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant"] * 2
    assert rows[1]["content"] == "one two"
    assert rows[2]["id"] == "u2"
    cuts = await lab.persistence.stores.messages.list_cuts("t1")
    assert [cut.message_ids for cut in cuts] == [["old"]]


async def test_two_regenerates_at_once_keep_both_answers(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("old"))
    first, second = kit.Paced(after=("A",)), kit.Paced(after=("B",))
    a = lab.start(kit.user("u1"), adapter=first)
    b = lab.start(kit.user("u1"), adapter=second)
    await first.began.wait()
    await second.began.wait()
    first.go.set()
    await a
    second.go.set()
    await b
    assert await lab.said() == ["user: hello", "assistant: one A", "assistant: one B"]


async def test_an_edit_does_not_cut_a_turn_that_came_after_its_read(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1"), kit.user("u2"), kit.assistant("a2"))
    (backend,) = lab.persistence.backends
    real, late = backend._commit_turn, False

    async def slip_in(commit: TurnCommit) -> Any:
        nonlocal late
        if not late and commit.run_id == "r1":
            late = True
            rows = await lab.stored()
            await lab.fill(*rows, kit.user("u9"), kit.assistant("a9"))
        return await real(commit)

    backend._commit_turn = slip_in
    await lab.turn(kit.user("u1"), kit.assistant("a1"), kit.user("edit"), run_id="r1")
    ids = await lab.ids()
    assert ids[:5] == ["u1", "a1", "u9", "a9", "edit"]
    assert len(ids) == 6


async def test_a_thread_that_is_always_moved_gives_up_in_the_end(lab: Any, kit: Any) -> None:
    from chatkeep.errors import ThreadConflict

    model = kit.Paced()
    middleware = lab.middleware()
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await model.began.wait()
    lab.faults.refuse("commit_turn", times=30, error=ThreadConflict("t1"))
    model.go.set()
    assert kit.terminal(await task).code == "thread-conflict"
    assert middleware.counters["conflicts"] == 30
    assert (await lab.run("r1")).status == "failed"
