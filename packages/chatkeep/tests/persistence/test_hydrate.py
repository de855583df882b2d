"""The page load: what a freshly opened client gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep.persistence import hydrate_thread
from chatkeep.records import ActivityRecord, InterruptRecord
from chatkeep.stores import InterruptRef, RunStart, TurnCommit

pytestmark = pytest.mark.anyio


async def walk(lab: Any, limit: int, **options: Any) -> list[list[dict[str, Any]]]:
    """All pages, newest first."""
    pages, before = [], None
    for _ in range(1000):
        body = await hydrate_thread(
            lab.persistence, lab.thread_id, limit=limit, before=before, **options
        )
        pages.append(body["messages"])
        if not body["page"]["truncated"]:
            assert "cursor" not in body["page"]
            return pages
        before = body["page"]["cursor"]
        assert isinstance(before, str)
    raise AssertionError("the pages never end")


async def whole(lab: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = (await hydrate_thread(lab.persistence, lab.thread_id))[
        "messages"
    ]
    return messages


def chained(pages: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [message for page in reversed(pages) for message in page]


async def test_an_unknown_thread_is_an_empty_one(lab: Any) -> None:
    body = await hydrate_thread(lab.persistence, "nobody", limit=5)
    assert body == {
        "messages": [],
        "activeRun": None,
        "interrupts": None,
        "seen": 0,
        "page": {"truncated": False},
    }


async def test_a_reload_is_one_read(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1", "SCENARIO:server-tool"))
    lab.faults.log.clear()
    body = await hydrate_thread(lab.persistence, "t1")
    assert lab.faults.log == ["read_view"]
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "assistant"]
    assert body["seen"] == 4
    assert "page" not in body
    lab.faults.log.clear()
    await hydrate_thread(lab.persistence, "t1", limit=2)
    assert lab.faults.log == ["read_view"]


async def test_two_reloads_of_a_thread_without_ids_give_the_same_ids(lab: Any) -> None:
    await lab.fill(*({"role": "user", "content": str(i)} for i in range(3)))
    first, second = await whole(lab), await whole(lab)
    assert [m["id"] for m in first] == [m["id"] for m in second]
    assert len({m["id"] for m in first}) == 3
    assert chained(await walk(lab, 1)) == first


async def test_a_thread_without_ids_goes_on_with_the_ids_that_a_reload_showed(
    lab: Any, kit: Any
) -> None:
    await lab.fill({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    shown = [
        {"id": m["id"], "role": m["role"], "content": m["parts"][0]["content"]}
        for m in await whole(lab)
    ]
    await lab.turn(*shown, kit.user("u1"))
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"] * 2


# -------------------------------------------------------------------------- active run


async def test_the_running_run_is_reported_with_its_question_and_its_draft(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced()
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=lab.middleware(snapshot_streaming=True)
    )
    await lab.until(lambda: lab.faults.applied["save_draft"] > 0)
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["activeRun"] == {"runId": "r1"}
    assert [m["role"] for m in body["messages"]] == ["user", "assistant"]
    assert body["messages"][1]["parts"] == [{"type": "text", "content": "one "}]
    paged = await hydrate_thread(lab.persistence, "t1", limit=10)
    assert paged["messages"] == body["messages"]
    model.go.set()
    await task
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["activeRun"] is None
    assert body["messages"][1]["parts"] == [{"type": "text", "content": "one two"}]


async def test_drafts_of_two_runs_stand_behind_their_questions(lab: Any, kit: Any) -> None:
    middleware = lab.middleware(snapshot_streaming=True)
    first, second = kit.Paced(before=("A",)), kit.Paced(before=("B",))
    a = lab.start(kit.user("uA"), adapter=first, middleware=middleware)
    await first.said.wait()
    b = lab.start(kit.user("uB"), adapter=second, middleware=middleware)
    await lab.until(lambda: lab.faults.applied["save_draft"] == 2)
    texts = [m["parts"][0]["content"] for m in await whole(lab)]
    assert texts == ["hello", "A", "hello", "B"]
    assert (await hydrate_thread(lab.persistence, "t1"))["activeRun"] == {"runId": "r2"}
    for model, task in ((first, a), (second, b)):
        model.go.set()
        await task


async def test_a_running_regenerate_hides_what_it_replaces_and_nothing_else(
    lab: Any, kit: Any
) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("old"))
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    body = await hydrate_thread(lab.persistence, "t1")
    assert [m["id"] for m in body["messages"]] == ["u1"]
    assert body["seen"] == 2
    await lab.turn(kit.user("u2"))
    assert [m["id"] for m in await whole(lab)][:2] == ["u1", "u2"]
    assert chained(await walk(lab, 1)) == await whole(lab)
    model.go.set()
    await task
    assert [m["role"] for m in await whole(lab)] == ["user", "assistant"] * 2


async def test_a_regenerate_whose_process_died_shows_the_old_answer_again(kit: Any) -> None:
    from chatkeep.memory import memory_persistence

    now = 1_000_000
    lab = kit.Lab(memory_persistence(clock=lambda: now))
    await lab.fill(kit.user("u1"), kit.assistant("old"))
    model = kit.Paced()
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=lab.middleware(snapshot_streaming=True)
    )
    await lab.until(lambda: lab.faults.applied["save_draft"] > 0)
    assert [m["role"] for m in await whole(lab)] == ["user", "assistant"]
    assert (await whole(lab))[1]["id"] != "old"
    now += 30_001
    body = await hydrate_thread(lab.persistence, "t1")
    assert [m["id"] for m in body["messages"]] == ["u1", "old"]
    assert body["activeRun"] is None
    model.go.set()
    await task


# -------------------------------------------------------------------------- interrupts


def waiting(interrupt_id: str = "i1", **payload: Any) -> InterruptRecord:
    return InterruptRecord(
        interrupt_id=interrupt_id,
        run_id="r0",
        thread_id="t1",
        requested_at=1,
        payload={"id": interrupt_id, "reason": "r", "message": "m", **payload},
    )


async def test_pending_interrupts_come_back_with_their_owner(lab: Any) -> None:
    interrupts = lab.persistence.stores.interrupts
    foreign, own = waiting("i1"), waiting("i2", toolCallId="c1")
    await interrupts.create(foreign)
    await interrupts.create(own)
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["interrupts"] == {
        "runId": "r0",
        "pending": [{**foreign.payload, "owner": False}, {**own.payload, "owner": True}],
    }


async def test_a_claimed_interrupt_is_reported_as_the_run_that_continues(lab: Any) -> None:
    (backend,) = lab.persistence.backends
    await lab.persistence.stores.interrupts.create(waiting(toolCallId="c1"))
    await backend.commit_turn(
        TurnCommit(
            commit_id="c",
            thread_id="t1",
            run_id="r5",
            claims=[InterruptRef(interrupt_id="i1", run_id="r0")],
            run=RunStart(run_id="r5", started_at=1, lease_token="mine"),
        )
    )
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["interrupts"] is None
    assert body["activeRun"] == {"runId": "r5"}


# ------------------------------------------------------------------------------- runs


async def test_ended_runs_and_their_times_come_on_request(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1"))
    await lab.turn(kit.user("u2", "SCENARIO:error"))
    body = await hydrate_thread(lab.persistence, "t1", include_runs=True)
    run = await lab.run("r1")
    assert [(r["runId"], r["status"]) for r in body["runs"]] == [
        ("r1", "completed"),
        ("r2", "failed"),
    ]
    answer = body["messages"][1]
    assert answer["metadata"]["tanstack"]["run"] == {
        "id": "r1",
        "startedAt": run.started_at,
        "finishedAt": run.finished_at,
    }
    assert "startedAt" not in (await whole(lab))[1]["metadata"]["tanstack"]["run"]


# ------------------------------------------------------------------------------ paging


async def test_a_walk_shows_every_message_once_at_every_page_size(lab: Any, kit: Any) -> None:
    for number in range(4):
        await lab.turn(kit.user(f"u{number}", "SCENARIO:server-tool-text"))
    everything = await whole(lab)
    assert len(everything) == 12
    for limit in range(1, 14):
        pages = await walk(lab, limit)
        assert chained(pages) == everything
        assert all(len(page) == limit for page in pages[:-1])
        assert all(page for page in pages)


async def test_a_window_never_begins_at_a_tool_result(lab: Any, kit: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    await lab.fill(
        kit.user("u1"),
        {"id": "a1", "role": "assistant", "content": None, "toolCalls": [call]},
        *(
            {"id": f"x{i}", "role": "tool", "toolCallId": f"z{i}", "content": "1"}
            for i in range(30)
        ),
        {"id": "t1", "role": "tool", "toolCallId": "c1", "content": "1"},
    )
    everything = await whole(lab)
    assert chained(await walk(lab, 1)) == everything
    (page,) = await walk(lab, 50)
    assert page == everything


async def test_a_message_of_several_segments_is_never_torn(lab: Any, kit: Any) -> None:
    def segment(number: int) -> list[dict[str, Any]]:
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "f", "arguments": "{}"},
        }
        return [
            {"id": "a1", "role": "assistant", "content": f"s{number}", "toolCalls": [call]},
            {"id": f"t{number}", "role": "tool", "toolCallId": f"c{number}", "content": "1"},
        ]

    await lab.fill(kit.user("u1"), *(row for n in range(40) for row in segment(n)), kit.user("u2"))
    everything = await whole(lab)
    assert len(everything) == 3
    assert chained(await walk(lab, 1)) == everything


async def test_cursors_survive_new_turns_and_cuts(lab: Any, kit: Any) -> None:
    await lab.fill(*(kit.user(f"m{i}") for i in range(6)))
    first = await hydrate_thread(lab.persistence, "t1", limit=2)
    await lab.turn(kit.user("u1"))
    older = await hydrate_thread(lab.persistence, "t1", limit=2, before=first["page"]["cursor"])
    assert [m["id"] for m in older["messages"]] == ["m2", "m3"]
    # The row that the cursor names is cut: what is older is still there.
    await lab.turn(kit.user("m0"), kit.user("m1"), kit.user("other"))
    older = await hydrate_thread(lab.persistence, "t1", limit=2, before=first["page"]["cursor"])
    assert [m["id"] for m in older["messages"]] == ["m0", "m1"]
    assert older["page"] == {"truncated": False}


@pytest.mark.parametrize(
    "garbage", ["", "msg-1", "-3", "1e9", "9" * 40, "9" * 18, "0", "\x00", "1.x"]
)
async def test_a_cursor_that_is_none_is_an_empty_last_page(
    lab: Any, kit: Any, garbage: str
) -> None:
    await lab.fill(kit.user("u1"), kit.user("u2"))
    body = await hydrate_thread(lab.persistence, "t1", limit=1, before=garbage)
    assert body["messages"] == []
    assert body["page"] == {"truncated": False}


async def test_a_page_has_at_most_500_messages(lab: Any, kit: Any) -> None:
    await lab.fill(*(kit.user(f"m{i}") for i in range(510)))
    body = await hydrate_thread(lab.persistence, "t1", limit=10**9)
    assert len(body["messages"]) == 500
    assert body["page"]["truncated"]


async def test_a_page_of_a_long_thread_reads_a_page(lab: Any, kit: Any) -> None:
    await lab.fill(*(kit.user(f"m{i}") for i in range(20_000)))
    (backend,) = lab.persistence.backends
    rows: list[int] = []
    real = backend._read_view

    async def spy(thread_id: str, query: Any) -> Any:
        view = await real(thread_id, query)
        rows.append(len(view.messages))
        return view

    backend._read_view = spy
    body = await hydrate_thread(lab.persistence, "t1", limit=20)
    assert [m["id"] for m in body["messages"]] == [f"m{i}" for i in range(19_980, 20_000)]
    assert rows == [48]


# -------------------------------------------------------------------------- activities


def activity(name: str, index: int) -> ActivityRecord:
    return ActivityRecord(id=name, activity_type="search", content={"q": name}, index=index)


async def test_activities_are_in_place_and_every_page_walk_shows_each_once(
    lab: Any, kit: Any
) -> None:
    await lab.fill(*(kit.user(f"m{i}") for i in range(5)))
    rows = [activity("x0", 0), activity("x1", 2), activity("x2", 3), activity("x9", 99)]
    await lab.persistence.stores.activities.save_activities("t1", rows)
    everything = await whole(lab)
    assert [m["id"] for m in everything] == [
        "x0", "m0", "x1", "x2", "m1", "m2", "m3", "m4", "x9",
    ]  # fmt: skip
    assert everything[0] == {
        "id": "x0",
        "role": "activity",
        "parts": [{"type": "activity", "activityType": "search", "content": {"q": "x0"}}],
    }
    for limit in range(1, 11):
        pages = await walk(lab, limit)
        assert chained(pages) == everything
        assert all(len(page) == limit for page in pages[:-1])


async def test_activities_alone_are_a_thread_too(lab: Any) -> None:
    await lab.persistence.stores.activities.save_activities(
        "t1", [activity("x0", 0), activity("x1", 1)]
    )
    assert [m["id"] for m in await whole(lab)] == ["x0", "x1"]
    assert chained(await walk(lab, 1)) == await whole(lab)


async def test_a_reload_in_the_middle_of_a_finish_never_shows_less_than_the_question(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced(waits=False)
    task = lab.start(kit.user("u1"), adapter=model)
    seen = set()
    while not task.done():
        body = await hydrate_thread(lab.persistence, "t1")
        seen.add((bool(body["activeRun"]), len(body["messages"])))
        await asyncio.sleep(0)
    assert seen <= {(False, 0), (True, 1), (False, 2)}


async def test_an_answered_question_never_comes_back(lab: Any) -> None:
    """Settled in any order, under any run: a page load shows what still waits, and nothing else."""
    interrupts = lab.persistence.stores.interrupts
    for name in ("i1", "i2", "i3"):
        await interrupts.create(waiting(name, toolCallId=f"c-{name}"))
    await interrupts.resolve("t1", "i2", {"approved": True})
    await interrupts.cancel("t1", "i1")
    body = await hydrate_thread(lab.persistence, "t1")
    assert [row["id"] for row in body["interrupts"]["pending"]] == ["i3"]
    await interrupts.resolve("t1", "i3", None)
    assert (await hydrate_thread(lab.persistence, "t1"))["interrupts"] is None


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"id": 1, "reason": [], "message": {}},
        {"toolCallId": 5, "metadata": {"kind": 7}, "expiresAt": "never"},
        {"metadata": "none"},
    ],
)
async def test_a_question_with_a_broken_payload_hides_no_other(
    lab: Any, kit: Any, broken: dict[str, Any]
) -> None:
    """A page load shows both; a post is refused with a code, as by any question that waits."""
    interrupts = lab.persistence.stores.interrupts
    await interrupts.create(waiting(toolCallId="c1"))
    await interrupts.create(
        InterruptRecord(
            interrupt_id="i2", run_id="r0", thread_id="t1", requested_at=2, payload=broken
        )
    )
    body = await hydrate_thread(lab.persistence, "t1")
    good, odd = body["interrupts"]["pending"]
    assert good["id"] == "i1"
    assert odd == {**broken, "owner": True}
    assert kit.terminal(await lab.turn(kit.user("u1"))).code == "unknown-interrupt"
    await interrupts.cancel("t1", "i2", run_id="r0")
    body = await hydrate_thread(lab.persistence, "t1")
    assert [row["id"] for row in body["interrupts"]["pending"]] == ["i1"]
