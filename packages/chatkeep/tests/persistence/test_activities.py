"""Activity rows of a turn: cut with their messages, never worth a failed run."""

from __future__ import annotations

from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

from chatkeep.errors import RecordTooLarge
from chatkeep.records import ActivityRecord
from chatkeep.stores import TurnCommit

pytestmark = pytest.mark.anyio


def row(name: str, index: int, content: Any = None) -> ActivityRecord:
    return ActivityRecord(
        id=name, activity_type="search", content={"v": content or name}, index=index
    )


def posted(name: str, content: str) -> dict[str, Any]:
    return {"id": name, "role": "activity", "activityType": "search", "content": {"v": content}}


async def ids(lab: Any) -> list[str]:
    rows = await lab.persistence.stores.activities.load_activities("t1")
    return [record.id for record in rows]


async def prepared(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1"))
    await lab.persistence.stores.activities.save_activities("t1", [row("x0", 0), row("x1", 2)])


async def test_a_regenerate_takes_the_rows_of_the_old_answer_when_it_is_stored(
    lab: Any, kit: Any
) -> None:
    await prepared(lab, kit)
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    assert await ids(lab) == ["x0", "x1"]
    model.go.set()
    await task
    assert await ids(lab) == ["x0"]


async def test_a_row_between_question_and_answer_goes_with_the_answer(lab: Any, kit: Any) -> None:
    """It follows the question, which the post brings along, but it was shown for the answer."""
    await lab.fill(kit.user("u1"), kit.assistant("a1"))
    rows = [row("x0", 1).model_copy(update={"anchor": "u1"})]
    await lab.persistence.stores.activities.save_activities("t1", rows)
    await lab.turn(kit.user("u1"))
    assert await ids(lab) == []


async def test_a_regenerate_that_fails_leaves_the_rows_too(lab: Any, kit: Any) -> None:
    await prepared(lab, kit)
    model = kit.Paced(waits=False, error=RuntimeError("no"))
    assert isinstance(kit.terminal(await lab.turn(kit.user("u1"), adapter=model)), RunErrorEvent)
    assert await ids(lab) == ["x0", "x1"]


async def test_an_edit_takes_the_rows_behind_it_at_once(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1"), kit.user("u2"), kit.assistant("a2"))
    rows = [row("x0", 1), row("x1", 4)]
    await lab.persistence.stores.activities.save_activities("t1", rows)
    model = kit.Paced()
    task = lab.start(kit.user("u1"), kit.assistant("a1"), kit.user("edit"), adapter=model)
    await model.began.wait()
    assert await ids(lab) == ["x0"]
    model.go.set()
    await task


async def test_a_posted_copy_changes_content_and_keeps_the_stored_place(lab: Any, kit: Any) -> None:
    await prepared(lab, kit)
    await lab.turn(posted("x1", "new"), kit.user("u1"), kit.assistant("a1"), kit.user("u2"))
    rows = await lab.persistence.stores.activities.load_activities("t1")
    assert [(r.id, r.index, r.content["v"]) for r in rows] == [("x0", 0, "x0"), ("x1", 2, "new")]


async def test_only_changed_rows_are_sent(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"))
    rows = [row(f"x{i}", i) for i in range(50)]
    await lab.persistence.stores.activities.save_activities("t1", rows)
    (backend,) = lab.persistence.backends
    sent: list[TurnCommit] = []
    real = backend._commit_turn

    async def spy(commit: TurnCommit) -> Any:
        sent.append(commit)
        return await real(commit)

    backend._commit_turn = spy
    await lab.turn(posted("x7", "new"), kit.user("u2"))
    start, finish = sent
    assert start.activities is not None
    assert list(start.activities.puts) == [7]
    assert start.activities.length == 50
    assert finish.activities is None


async def test_a_row_that_cannot_be_stored_is_dropped_and_counted(lab: Any, kit: Any) -> None:
    told: list[str] = []
    middleware = lab.middleware(on_persistence_error=lambda phase, _: told.append(phase))
    bad = {**posted("bad", ""), "content": {"v": float("nan")}}
    events = await lab.turn(kit.user("u1"), bad, posted("good", "v"), middleware=middleware)
    assert isinstance(kit.terminal(events), RunFinishedEvent)
    assert await ids(lab) == ["good"]
    assert middleware.counters["activities_dropped"] >= 1
    assert set(told) == {"activities"}


async def test_rows_that_make_a_commit_too_large_are_left_out_of_it(lab: Any, kit: Any) -> None:
    (backend,) = lab.persistence.backends
    real = backend._commit_turn

    async def small(commit: TurnCommit) -> Any:
        if commit.activities is not None:
            raise RecordTooLarge("the commit", 2, 1)
        return await real(commit)

    backend._commit_turn = small
    middleware = lab.middleware()
    events = await lab.turn(kit.user("u1"), posted("x", "v"), middleware=middleware)
    assert isinstance(kit.terminal(events), RunFinishedEvent)
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"]
    assert await ids(lab) == []
    assert middleware.counters["activities_failures"] == 2
