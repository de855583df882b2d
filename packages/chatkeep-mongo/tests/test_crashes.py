"""The process dies before or after any single write: a thread is what it was, or what it was to be.

Nothing in between is ever seen, whoever looks first; and the same call, sent again by another
process, brings the thread to where it was to be, once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import ChatkeepError
from chatkeep.records import ActivityRecord, InterruptRecord, RunError, RunPatch
from chatkeep.scope import Scope
from chatkeep.stores import (
    ActivitiesWrite,
    CutAppend,
    InterruptAnswer,
    InterruptRef,
    RunStart,
    Splice,
    TurnCommit,
    ViewQuery,
)
from servers.mongo import MongoDatabase

pytestmark = pytest.mark.anyio

Step = Callable[[Any, dict[str, Any]], Awaitable[Any]]
EVERYTHING = ViewQuery(runs="all", interrupts="all", activities=True, drafts=True, run_id="r1")
LATER = {"format": 2}


def user(message_id: str, text: str = "x") -> Any:
    return {"id": message_id, "role": "user", "content": text}


def assistant(message_id: str, text: str = "x") -> Any:
    return {"id": message_id, "role": "assistant", "content": text}


def asked(run_id: str, interrupt_id: str, **payload: Any) -> InterruptRecord:
    return InterruptRecord(
        interrupt_id=interrupt_id, run_id=run_id, thread_id="t", requested_at=1, payload=payload
    )


def row(name: str, text: str = "x") -> ActivityRecord:
    return ActivityRecord(id=name, activity_type="card", content={"text": text}, index=0)


def commit(commit_id: str, **parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=commit_id, thread_id="t", **parts)


async def paused(backend: Any, notes: dict[str, Any]) -> None:
    """A thread with a cut, a run that waits for two answers, UI rows and a draft."""
    await backend.commit_turn(
        commit(
            "p1",
            run_id="r1",
            splice=Splice(keep_through=0, tail=[user("u1"), assistant("old")], expected=""),
            run=RunStart(run_id="r1", started_at=1, lease_token="k", parent_run_id="r0"),
        )
    )
    first = await backend.commit_turn(
        commit(
            "p2",
            run_id="r1",
            lease_token="k",
            splice=Splice(keep_through=1, tail=[assistant("a1")]),
            interrupts=[asked("r1", "i1"), asked("r1", "i2")],
            activities=ActivitiesWrite(puts={0: row("one"), 1: row("two")}, length=2),
            run=RunPatch(status="interrupted"),
        )
    )
    notes["cut"] = first.cut_id
    await backend.save_draft("t", "r1", [assistant("draft")], lease_token="k")


async def nothing(_backend: Any, _notes: dict[str, Any]) -> None:
    """A thread that does not exist."""


async def begin(backend: Any, _notes: dict[str, Any]) -> Any:
    return await backend.commit_turn(
        commit(
            "begin",
            run_id="r1",
            splice=Splice(keep_through=0, tail=[user("u1"), user("u2")], expected=""),
            run=RunStart(run_id="r1", started_at=1, lease_token="k", parent_run_id="r0"),
            activities=ActivitiesWrite(puts={0: row("one")}, length=1),
            interrupts=[asked("r1", "i1")],
        )
    )


async def resume(backend: Any, _notes: dict[str, Any]) -> Any:
    """The start of a second run: it claims the answers, before anything executes."""
    return await backend.commit_turn(
        commit(
            "resume",
            run_id="r2",
            claims=[
                InterruptRef(interrupt_id="i1", run_id="r1"),
                InterruptRef(interrupt_id="i2", run_id="r1"),
            ],
            run=RunStart(run_id="r2", started_at=2, lease_token="k2", hide_from=3),
        )
    )


async def finish(backend: Any, _notes: dict[str, Any]) -> Any:
    """Everything that a boundary may have: a cut, a replaced message, answers, rows, the run."""
    return await backend.commit_turn(
        commit(
            "finish",
            run_id="r1",
            lease_token="k",
            splice=Splice(keep_through=0, tail=[user("u1", "edited"), assistant("a2")]),
            answers=[
                InterruptAnswer(interrupt_id="i1", response={"ok": True}),
                InterruptAnswer(interrupt_id="i2", status="cancelled"),
            ],
            interrupts=[asked("r1", "i3")],
            activities=ActivitiesWrite(puts={0: row("changed")}, length=1),
            run=RunPatch(
                status="failed", finished_at=9, error=RunError(message="no", code="worker_lost")
            ),
            drop_draft=True,
        )
    )


async def restore(backend: Any, notes: dict[str, Any]) -> Any:
    return await backend.commit_turn(commit("restore", restore=notes["cut"]))


async def append(backend: Any, notes: dict[str, Any]) -> Any:
    part = CutAppend(cut_id=notes["cut"], messages=[assistant("late"), assistant("later")])
    return await backend.commit_turn(
        commit("append", cut_append=part, run_id="r1", run=RunPatch(detached=True))
    )


async def large(backend: Any, _notes: dict[str, Any]) -> Any:
    """Bodies in pieces, over others that were in pieces, and a redo record that is staged."""
    return await backend.commit_turn(
        commit(
            "large",
            run_id="r1",
            lease_token="k",
            splice=Splice(keep_through=1, tail=[assistant("a2", "long " * 80)], archive=False),
            answers=[InterruptAnswer(interrupt_id="i1", response="long " * 80)],
            activities=ActivitiesWrite(puts={1: row("two", "long " * 80)}, length=2),
            run=RunPatch(status="completed", usage={"note": "long " * 80}),
            drop_draft=True,
        )
    )


async def erase(backend: Any, _notes: dict[str, Any]) -> Any:
    return await backend.erase_messages("t", ["a1", "old"])


async def purge(backend: Any, _notes: dict[str, Any]) -> Any:
    return await backend.purge_cuts("t", before=2**52)


async def delete(backend: Any, _notes: dict[str, Any]) -> Any:
    return await backend.delete_thread("t")


async def late_lease(backend: Any, _notes: dict[str, Any]) -> Any:
    return await backend.renew_lease("t", "r1", "k", 60_000)


async def lost(backend: Any, _notes: dict[str, Any]) -> None:
    """A run whose lease has run out."""
    await backend.commit_turn(
        commit(
            "p1",
            run_id="r1",
            run=RunStart(run_id="r1", started_at=1, lease_token="k", lease_ms=-5),
        )
    )


@dataclass(frozen=True)
class Case:
    """``act`` on what ``prepare`` leaves."""

    prepare: Step
    act: Step


CASES = {
    "begin": Case(nothing, begin),
    "resume": Case(paused, resume),
    "finish": Case(paused, finish),
    "restore": Case(paused, restore),
    "append": Case(paused, append),
    "large": Case(paused, large),
    "erase": Case(paused, erase),
    "purge": Case(paused, purge),
    "delete": Case(paused, delete),
    "late lease": Case(lost, late_lease),
}


# ------------------------------------------------------------------------------- looking


async def look(backend: Any) -> dict[str, Any]:
    """All that anybody can see of the thread; without clocks and random names."""
    view = await backend.read_view("t", EVERYTHING)
    ranks = {number: i for i, number in enumerate(sorted(view.numbers))}

    def plain(record: Any) -> dict[str, Any]:
        data = {k: v for k, v in record.to_json().items() if k not in {"updatedAt", "resolvedAt"}}
        if "lease" in data:
            data["lease"] = (data["lease"]["token"], data["lease"]["until"] > view.now)
        return data

    cuts = []
    for cut in await backend.list_cuts("t"):
        messages = await backend.load_cut("t", cut.cut_id)
        cuts.append((cut.run_id, cut.message_ids, cut.extra, messages))
    found = {run_id: await backend.find_run(run_id) for run_id in ("r1", "r2")}
    children = await backend.list_child_runs(["r0"])
    listed = await backend.list_threads(limit=9, cursor=None, children=False)
    return {
        "exists": view.exists,
        "messages": view.messages,
        "numbers": [ranks[number] for number in view.numbers],
        "newest": ranks.get(view.newest),
        "run": view.run and plain(view.run),
        "runs": [plain(run) for run in view.runs],
        "found": {name: run and plain(run) for name, run in found.items()},
        "children": [run.run_id for run in children["r0"]],
        "interrupts": [plain(record) for record in view.interrupts],
        "activities": [plain(record) for record in view.activities],
        "drafts": [plain(draft) for draft in view.drafts],
        "cuts": cuts,
        "threads": [(t.thread_id, t.message_count) for t in listed.threads],
        "metadata": await backend.metadata_of("t"),
    }


async def first_to_look(backend: Any, state: int) -> tuple[str, Any]:
    """What one reader sees who comes before all others: each call is the first for some crash."""
    match state % 6:
        case 0:
            view = await backend.read_view("t", ViewQuery(run_id="r1"))
            return "status", view.run and view.run.status
        case 1:
            run = await backend.find_run("r1")
            return "status", run and run.status
        case 2:
            children = (await backend.list_child_runs(["r0"]))["r0"]
            return "children", [run.run_id for run in children]
        case 3:
            return "cuts", len(await backend.list_cuts("t"))
        case 4:
            listed = await backend.list_threads(limit=9, cursor=None, children=False)
            return "threads", [(t.thread_id, t.message_count) for t in listed.threads]
        case _:
            await backend.list_lost(limit=100)
            return "swept", None


def agrees(seen: tuple[str, Any], state: dict[str, Any]) -> bool:
    what, value = seen
    if what == "status":
        return value == (state["run"] and state["run"]["status"])
    if what == "cuts":
        return value == len(state["cuts"])
    return what == "swept" or value == state[what]


@pytest.mark.parametrize("name", CASES)
async def test_a_thread_is_old_or_new_wherever_the_process_dies(
    plain: Persistence, tools: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after every write of the call."""
    case = CASES[name]
    if name == "large":
        monkeypatch.setattr("chatkeep_mongo.bodies.INLINE", 100)
        monkeypatch.setattr("chatkeep_mongo.redo.STAGE_ABOVE", 200)
        monkeypatch.setattr("chatkeep_mongo.redo._short", lambda _redo: False)

    async def prepared(scope: Scope) -> tuple[Any, dict[str, Any]]:
        backend: Any = plain.scoped(scope).backends[0]
        notes: dict[str, Any] = {}
        await case.prepare(backend, notes)
        if case.prepare is paused:
            await backend.metadata_put("n", "t", {"v": 1}, None)
        return backend, notes

    whole, notes = await prepared(Scope(tenant_id="whole"))
    old = await look(whole)
    await case.act(whole, notes)
    new = await look(whole)
    assert old != new

    outcomes: list[bool] = []
    for turn in count(2):
        at, after = turn // 2, bool(turn % 2)
        scope = Scope(tenant_id=f"crash {at}", user_id="after" if after else "before")
        backend, notes = await prepared(scope)
        broken, watch = tools.watched(plain, scope, crash_at=at, after=after)
        try:
            await case.act(broken, notes)
        except tools.Crash:
            pass
        else:
            break
        assert watch.dead
        seen = await first_to_look(backend, turn)
        state = await look(backend)
        if name == "delete":
            # Values under the thread's id are found without its head, and go with the rest.
            state["metadata"] = new["metadata"] if not state["exists"] else old["metadata"]
        assert state in (old, new), f"mixed after {watch.sent}"
        assert agrees(seen, state)
        outcomes.append(state == new)
        try:
            await case.act(backend, notes)
        except ChatkeepError:
            # What is done cannot be done twice, and says so.
            assert state == new
        assert await look(backend) == new
    assert False in outcomes
    assert True in outcomes
    assert outcomes == sorted(outcomes)
    print(f"{name}: {len(outcomes)} crashes, {sum(outcomes)} of them behind the commit")


async def test_messages_that_a_crash_left_behind_are_in_nobodys_way(
    plain: Persistence, tools: Any
) -> None:
    """They stand at the next numbers and were never committed: the next turn passes them by, nobody
    reads them, and they can be erased by name."""
    backend = tools.backend(plain)
    first = await backend.commit_turn(tools.said("t", "a"))
    broken, _ = tools.watched(plain, crash_at=1, after=True)
    lost = commit("lost", splice=Splice(keep_through=9, tail=[user("lost"), user("lost too")]))
    with pytest.raises(tools.Crash):
        await broken.commit_turn(lost)
    assert (await backend.read_view("t", ViewQuery())).numbers == first.numbers
    second = await backend.commit_turn(tools.said("t", "b", keep=9, expected=first.revision))
    assert second.numbers == [4]
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == ["a", "b"]
    assert await backend.erase_messages("t", ["lost"]) == 0
    rows = await backend._db.find("chatkeep_entries", {}, sort=[("n", 1)])
    assert [row["id"] for row in rows] == ["a", "lost too", "b"]
    again = await backend.commit_turn(lost)
    assert again.numbers == [5, 6]
    assert await backend.delete_thread("t")
    assert await backend._db.find("chatkeep_entries", {}) == []


async def test_what_a_crash_left_undone_is_done_by_a_sweep(plain: Persistence, tools: Any) -> None:
    """Nobody looks at the thread: a deletion is finished, and a run that died at its start is found
    once its lease is over."""
    backend = tools.backend(plain)
    await backend.commit_turn(tools.said("gone", "a"))
    broken, _ = tools.watched(plain, crash_at=1, after=True)
    with pytest.raises(tools.Crash):
        await broken.delete_thread("gone")
    broken, _ = tools.watched(plain, crash_at=3, after=True)
    start = RunStart(run_id="r", started_at=1, lease_token="k", lease_ms=-1)
    with pytest.raises(tools.Crash):
        await broken.commit_turn(
            commit("c", run=start, splice=Splice(keep_through=0, tail=[user("u")]))
        )
    swept = await plain.maintenance().sweep()
    assert [(lost.run.run_id, lost.run.status) for lost in swept] == [("r", "failed")]
    assert await backend._db.find("chatkeep_threads", {"thread_id": "gone"}) == []
    assert [row["id"] for row in await backend._db.find("chatkeep_entries", {})] == ["u"]


async def test_what_cannot_be_read_hinders_no_sweep(
    plain: Persistence, tools: Any, mongo_database: MongoDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    """A head of a later format with something left to do, and a damaged run: they are logged and
    stay, while the others are ended."""
    backend = tools.backend(plain)
    for name in ("sound", "spoiled"):
        run = RunStart(run_id=name, started_at=1, lease_token="k", lease_ms=-1)
        await backend.commit_turn(TurnCommit(commit_id=name, thread_id=name, run=run))
    broken, _ = tools.watched(plain, crash_at=3, after=True)
    start = RunStart(run_id="newer", started_at=1, lease_token="k", lease_ms=-1)
    with pytest.raises(tools.Crash):
        await broken.commit_turn(
            commit("newer", run=start, splice=Splice(keep_through=0, tail=[user("u")]))
        )
    with mongo_database.opened() as database:
        database["chatkeep_threads"].update_many({"redo.version": {"$gte": 0}}, {"$set": LATER})
        database["chatkeep_runs"].update_one({"run_id": "spoiled"}, {"$set": {"body": "{"}})
    swept = await plain.maintenance().sweep()
    assert [lost.run.run_id for lost in swept] == ["sound"]
    assert "run 'spoiled' cannot be read" in caplog.text
    assert "has left to do cannot be done" in caplog.text
    with mongo_database.opened() as database:
        assert database["chatkeep_threads"].count_documents(LATER) == 1


async def test_a_sweep_finishes_the_deletion_of_a_thread_that_never_began(
    plain: Persistence, tools: Any
) -> None:
    """All there is of it is a head that keeps it from a run which another thread has taken over."""
    backend = tools.backend(plain)
    await backend.ping()

    def start(thread: str) -> TurnCommit:
        run = RunStart(run_id="r", started_at=1)
        return TurnCommit(commit_id=thread, thread_id=thread, run=run)

    broken, _ = tools.watched(plain, crash_at=1, after=True)
    with pytest.raises(tools.Crash):
        await broken.commit_turn(start("x"))
    await backend.commit_turn(start("y"))
    broken, _ = tools.watched(plain, crash_at=1, after=True)
    with pytest.raises(tools.Crash):
        await broken.delete_thread("x")
    assert len(await backend._db.find("chatkeep_threads", {})) == 2
    await plain.maintenance().sweep()
    (left,) = await backend._db.find("chatkeep_threads", {})
    assert left["thread_id"] == "y"
