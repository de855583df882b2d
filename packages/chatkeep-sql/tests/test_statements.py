"""A boundary is one statement on PostgreSQL, and so is a read, whatever parts they have."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.engine import chat
from chatkeep.errors import InterruptConflict, RunConflict, ThreadConflict
from chatkeep.persistence import with_persistence
from chatkeep.records import ActivityRecord, InterruptRecord, RunError, RunPatch
from chatkeep.rules import new_commit_id
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
from chatkeep.testkit.scripted import ScriptedModel
from chatkeep_sql import postgres_persistence
from servers import Database

pytestmark = pytest.mark.anyio


def commit(**parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=new_commit_id(), thread_id="t", **parts)


def start(run_id: str, **parts: Any) -> RunStart:
    return RunStart(run_id=run_id, started_at=1, lease_token=f"lease of {run_id}", **parts)


def user(message_id: str) -> Any:
    return {"id": message_id, "role": "user", "content": "hello"}


async def test_every_boundary_of_a_turn_is_one_statement(
    on_postgres: Persistence, tools: Any
) -> None:
    """Start, interrupt, resume, regenerate, error and finish, with everything they may carry."""
    await on_postgres.migrate()
    backend = tools.backend(on_postgres)
    await backend.ping()
    asked = InterruptRecord(
        interrupt_id="i", run_id="r1", thread_id="t", requested_at=5, payload={"a": [1]}
    )
    row = ActivityRecord(id="a", activity_type="plan", content={"n": 1}, index=0)
    held = {"run_id": "r1", "lease_token": "lease of r1"}
    with tools.statements(on_postgres) as sent:

        async def one(**parts: Any) -> Any:
            sent.clear()
            receipt = await backend.commit_turn(commit(**parts))
            assert len(sent) == 1, sent
            return receipt

        first = await one(
            run_id="r1",
            run=start("r1"),
            splice=Splice(keep_through=0, tail=[user("u")], expected=""),
        )
        assert (first.numbers, first.newest, first.created_run) == ([1], 1, True)
        paused = await one(
            **held,
            run=RunPatch(status="interrupted"),
            interrupts=[asked],
            splice=Splice(keep_through=1, tail=[user("a"), user("b")], expected=first.revision),
            activities=ActivitiesWrite(puts={0: row}, length=1),
            drop_draft=True,
        )
        assert paused.run.status == "interrupted"
        resumed = await one(
            run_id="r2",
            run=start("r2", parent_run_id="r1"),
            claims=[InterruptRef(interrupt_id="i")],
        )
        assert resumed.revision == paused.revision
        finished = await one(
            run_id="r2",
            lease_token="lease of r2",
            answers=[InterruptAnswer(interrupt_id="i", response=None)],
            run=RunPatch(status="completed", finished_at=9, usage={"totalTokens": 3}),
            activities=ActivitiesWrite(puts={}, length=1),
        )
        assert finished.run.usage == {"totalTokens": 3}
        cut = await one(
            run_id="r3",
            run=start("r3", hide_from=2),
            splice=Splice(keep_through=1, tail=[user("b"), user("c")], expected=paused.revision),
        )
        assert cut.cut_id is not None
        assert cut.numbers == [4, 5]
        await one(
            run_id="r3",
            lease_token="lease of r3",
            run=RunPatch(status="failed", error=RunError(message="no", code="x"), hide_from=None),
            splice=Splice(keep_through=4, archive=False, expected=cut.revision),
        )
        await one(run_id="r9", splice=Splice(keep_through=4))
        sent.clear()
        view = await backend.read_view(
            "t",
            ViewQuery(run_id="r1", runs="all", interrupts="all", activities=True, drafts=True),
        )
        assert len(sent) == 1
    assert [m["id"] for m in view.messages] == ["u", "b"]
    assert view.run is not None
    assert view.run.status == "interrupted"
    assert [run.run_id for run in view.runs] == ["r1", "r2", "r3"]
    assert view.interrupts[0].status == "resolved"
    assert view.interrupts[0].response is None
    assert view.activities == [row]
    (record,) = await backend.list_cuts("t")
    assert record.message_ids == ["a"]
    assert record.numbers == [2]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_turn_is_two_round_trips_on_the_wire(
    postgres_database: Database, tools: Any, driver: Any
) -> None:
    """Counted in front of the server, once the connection has its statements prepared."""
    with postgres_database.server.proxy() as proxy:
        url = postgres_database.url(driver, proxy=proxy)
        async with postgres_persistence(url, pool_size=1) as persistence:
            backend = tools.backend(persistence)
            revision, newest, trips = "", 0, 0
            for number in range(20):
                held = {"run_id": f"r{number}"}
                trips = proxy.chunks_sent
                begun = await backend.commit_turn(
                    commit(
                        **held,
                        run=start(f"r{number}"),
                        splice=Splice(
                            keep_through=newest, tail=[user(f"u{number}")], expected=revision
                        ),
                    )
                )
                ended = await backend.commit_turn(
                    commit(
                        **held,
                        lease_token=f"lease of r{number}",
                        run=RunPatch(status="completed", finished_at=1),
                        splice=Splice(
                            keep_through=begun.newest,
                            tail=[user(f"a{number}"), user(f"b{number}")],
                            expected=begun.revision,
                        ),
                        drop_draft=True,
                    )
                )
                revision, newest = ended.revision, ended.newest
                trips = proxy.chunks_sent - trips
            assert trips == 2
            trips = proxy.chunks_sent
            await backend.read_view("t", ViewQuery())
            await backend.read_view("t", ViewQuery())
            assert proxy.chunks_sent - trips <= 3


async def test_a_chat_turn_is_one_read_and_two_writes(on_postgres: Persistence, tools: Any) -> None:
    """Over ``chat()`` with persistence, new threads and old ones: three statements in all."""
    await on_postgres.migrate()
    await on_postgres.ping()
    messages: list[Any] = []
    for number in range(3):
        messages.append({"id": f"u{number}", "role": "user", "content": "text hello"})
        with tools.statements(on_postgres) as sent:
            stream = chat(
                adapter=ScriptedModel(),
                messages=list(messages),
                thread_id="t",
                run_id=f"r{number}",
                middleware=[with_persistence(on_postgres)],
            )
            events = [event.type.value async for event in stream]
        assert events[-1] == "RUN_FINISHED"
        assert len(sent) == 3, sent
        messages = list(await on_postgres.stores.messages.load_thread("t"))
        assert len(messages) == 2 * (number + 1)


@pytest.mark.parametrize("messages", ["none", "bodies", "numbers", "digests"])
@pytest.mark.parametrize("page", [{}, {"limit": 2}, {"limit": 2, "before": 3}, {"before": 3}])
async def test_a_read_of_any_shape_is_one_statement(
    on_postgres: Persistence, tools: Any, messages: Any, page: dict[str, int]
) -> None:
    """Also of a thread that does not exist."""
    backend = tools.backend(on_postgres)
    await backend.commit_turn(commit(splice=Splice(keep_through=0, tail=[user(i) for i in "abcd"])))
    with tools.statements(on_postgres) as sent:
        view = await backend.read_view("t", ViewQuery(messages=messages, **page))
        assert len(sent) == 1
        assert not (await backend.read_view("nobody", ViewQuery(messages=messages))).exists
        assert len(sent) == 2
    numbers = [n for n in (1, 2, 3, 4) if n < page.get("before", 9)][-page.get("limit", 9) :]
    assert view.numbers == ([] if messages == "none" else numbers)


async def test_a_refusal_says_which_and_writes_nothing(
    on_postgres: Persistence, tools: Any
) -> None:
    """Order of refusal: run, interrupt, thread."""
    backend = tools.backend(on_postgres)
    receipt = await backend.commit_turn(
        commit(run_id="r", run=start("r"), splice=Splice(keep_through=0, tail=[user("u")]))
    )
    splice = Splice(keep_through=0, expected="another")
    answers = [InterruptAnswer(interrupt_id="nobody asked")]
    with pytest.raises(RunConflict):
        await backend.commit_turn(
            commit(run_id="r", lease_token="no", answers=answers, splice=splice)
        )
    with pytest.raises(RunConflict):
        await backend.commit_turn(commit(run=start("r"), answers=answers, splice=splice))
    with pytest.raises(InterruptConflict):
        await backend.commit_turn(commit(answers=answers, splice=splice))
    with pytest.raises(ThreadConflict):
        await backend.commit_turn(commit(splice=splice))
    view = await backend.read_view("t", ViewQuery(run_id="r"))
    assert view.revision == receipt.revision
    assert view.run == receipt.run


async def test_a_commit_sent_again_is_recognised_through_sixteen_others(
    persistence: Persistence, tools: Any
) -> None:
    """And no further: then its revision does not match any more."""
    backend = tools.backend(persistence)
    first = tools.said("t", "a", expected="")
    receipt = await backend.commit_turn(first)
    for _ in range(15):
        await backend.commit_turn(commit())
        again = await backend.commit_turn(first)
        assert again.replayed
        assert (again.revision, again.numbers) == (receipt.revision, receipt.numbers)
    await backend.commit_turn(commit())
    with pytest.raises(ThreadConflict):
        await backend.commit_turn(first)


async def test_a_restore_sent_again_is_recognised_with_its_numbers(
    persistence: Persistence, tools: Any
) -> None:
    """They need not follow one another: a detached run's messages joined the cut later."""
    backend = tools.backend(persistence)
    await backend.commit_turn(commit(splice=Splice(keep_through=0, tail=[user(i) for i in "abc"])))
    cut = await backend.commit_turn(commit(splice=Splice(keep_through=1, tail=[user("d")])))
    late = CutAppend(cut_id=cut.cut_id, messages=[user("e")])
    await backend.commit_turn(commit(cut_append=late))
    restore = commit(restore=cut.cut_id, restore_expected=cut.revision)
    receipt = await backend.commit_turn(restore)
    assert receipt.numbers == [2, 3, 5]
    again = await backend.commit_turn(restore)
    assert again.replayed
    assert (again.numbers, again.revision) == (receipt.numbers, receipt.revision)
    assert again.cut_id == receipt.cut_id
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == ["a", "b", "c", "e"]


async def test_no_index_covers_an_id(on_postgres: Persistence, tools: Any) -> None:
    """Ids of a kilobyte each, four-byte characters too, are found like any other."""
    backend = tools.backend(on_postgres)
    thread, run, name = "\U0001f9ed" * 256, "r" * 1024, "\u20ac" * 341
    asked = InterruptRecord(
        interrupt_id=name, run_id=run, thread_id=thread, requested_at=1, payload={}
    )
    await backend.commit_turn(
        TurnCommit(
            commit_id="c" * 1024,
            thread_id=thread,
            run_id=run,
            run=RunStart(run_id=run, started_at=1, parent_run_id=name),
            interrupts=[asked],
            splice=Splice(keep_through=0, tail=[user(name)]),
        )
    )
    assert (await backend.find_run(run)).parent_run_id == name
    assert await backend.metadata_put(name, thread, 1, None)
    assert (await backend.read_view(thread, ViewQuery())).interrupts == [asked]
    rows = await tools.execute(
        on_postgres,
        "select a.attname from pg_index i join pg_class c on c.oid = i.indrelid"
        " join pg_attribute a on a.attrelid = c.oid and a.attnum = any (i.indkey)"
        " where c.relname like 'chatkeep\\_%' and c.relname <> 'chatkeep_alembic_version'"
        " and a.atttypid = 'text'::regtype".replace("::", "\\:\\:"),
    )
    assert rows == []


async def test_a_list_of_threads_reads_no_transcript(on_postgres: Persistence, tools: Any) -> None:
    """One statement a page, over the heads: its cost has nothing to do with what was said."""
    for number in range(5):
        rows: Any = [{"role": "user", "content": "x" * 10_000}] * 20
        await on_postgres.stores.messages.save_thread(f"t{number}", rows)
    for limit, pages in ((2, 3), (50, 1)):
        shown, cursor = [], None
        with tools.statements(on_postgres) as sent:
            for _ in range(pages):
                page = await on_postgres.list_threads(limit=limit, cursor=cursor)
                shown += [(info.thread_id, info.message_count) for info in page.threads]
                cursor = page.cursor
        assert cursor is None
        assert shown == [(f"t{number}", 20) for number in range(4, -1, -1)]
        reads = [statement for statement in sent if "chatkeep_" in statement]
        assert len(reads) == pages
        assert not [statement for statement in reads if "chatkeep_entries" in statement]
