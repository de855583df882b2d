"""What calls cost: commands and bytes, counted."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from chatkeep import Persistence
from chatkeep.records import RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_mongo import mongo_persistence
from chatkeep_mongo.layout import thread_key
from servers.mongo import MongoDatabase

pytestmark = pytest.mark.anyio


def message(name: str, text: str = "x") -> Any:
    return {"id": name, "role": "user", "content": text}


async def turn(backend: Any, number: int, revision: str, text: str = "x") -> str:
    """Both boundaries of a turn, as ``with_persistence`` makes them; the revision afterwards."""
    run = f"r{number}"
    first = await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id="t",
            run_id=run,
            splice=Splice(
                keep_through=2**40, tail=[message(f"u{number}", text)], expected=revision
            ),
            run=RunStart(run_id=run, started_at=number, lease_token="k"),
        )
    )
    last = await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id="t",
            run_id=run,
            lease_token="k",
            splice=Splice(
                keep_through=first.newest,
                tail=[message(f"a{number}", text)],
                expected=first.revision,
            ),
            run=RunPatch(status="completed", finished_at=number),
            drop_draft=True,
        )
    )
    return str(last.revision)


async def test_the_commands_of_a_turn(plain: Persistence, tools: Any) -> None:
    """A read of two, a start of five, a finish of four, whatever the length of the thread; and none
    that is not needed."""
    backend, watch = tools.watched(plain)
    await backend.ping()
    revision = await turn(backend, 0, "")
    for number in (1, 2):
        watch.sent.clear()
        view = await backend.read_view("t", ViewQuery(run_id=f"r{number}"))
        assert [name for name, _ in watch.sent] == ["aggregate", "find"]
        assert len(view.messages) == 2 * number
        watch.sent.clear()
        revision = await turn(backend, number, revision)
        head, runs, entries = "chatkeep_threads", "chatkeep_runs", "chatkeep_entries"
        assert watch.sent == [
            ("insert", entries),
            ("insert", runs),
            ("update", head),
            ("change", runs),
            ("update", head),
            ("insert", entries),
            ("update", head),
            ("change", runs),
            ("update", head),
        ]


async def test_the_commands_of_smaller_calls(plain: Persistence, tools: Any) -> None:
    backend, watch = tools.watched(plain)
    await backend.ping()
    await backend.commit_turn(
        TurnCommit(
            commit_id="c",
            thread_id="t",
            run=RunStart(run_id="r", started_at=1, lease_token="k"),
            splice=Splice(keep_through=0, tail=[message("m")]),
        )
    )

    async def cost(work: Any) -> int:
        watch.sent.clear()
        await work
        return len(watch.sent)

    assert await cost(backend.save_draft("t", "r", [message("d")], lease_token="k")) == 1
    assert await cost(backend.renew_lease("t", "r", "k", 60_000)) == 2
    assert await cost(backend.find_run("r")) == 1
    assert await cost(backend.list_child_runs(["r", "q"])) == 1
    assert await cost(backend.metadata_put("n", "k", 1, None)) == 1
    assert await cost(backend.metadata_get("n", "k")) == 1
    assert await cost(backend.list_threads(limit=9, cursor=None, children=False)) == 1
    assert await cost(backend.read_view("t", ViewQuery(messages="numbers", runs="none"))) == 1
    assert await cost(backend.commit_turn(tools.said("t", "n", keep=1))) == 2
    # What another process has read, this one must read too.
    backend._hints.forget(thread_key(backend.scope, "t"))
    assert await cost(backend.commit_turn(tools.said("t", "o", keep=2))) == 3


async def test_bytes_of_a_turn_do_not_grow_with_the_thread(
    mongo_database: MongoDatabase, tools: Any
) -> None:
    """Ten messages in the thread, or a thousand: a boundary sends what is new."""
    with mongo_database.server.proxy() as proxy:
        async with mongo_persistence(mongo_database.url(proxy=proxy)) as persistence:
            backend = tools.backend(persistence)
            sent: list[int] = []
            revision = ""
            for size in (10, 1000):
                have = (await backend.read_view("t", ViewQuery(messages="numbers"))).newest
                rows: Any = [message(f"m{n}", "y" * 100) for n in range(have, size)]
                receipt = await backend.commit_turn(
                    TurnCommit(
                        commit_id=new_commit_id(),
                        thread_id="t",
                        splice=Splice(keep_through=2**40, tail=rows),
                    )
                )
                revision = receipt.revision
                before = proxy.bytes_sent, proxy.bytes_received
                await turn(backend, size, revision, "z" * 1000)
                sent.append(proxy.bytes_sent - before[0])
                assert proxy.bytes_received - before[1] < 12_000
            assert sent[1] < sent[0] * 1.1
            assert 2_000 < sent[0] < 12_000


async def test_a_cut_reads_and_moves_no_body(mongo_database: MongoDatabase, tools: Any) -> None:
    """A thousand messages of a kilobyte are cut: what goes over the wire is what replaces them."""
    with mongo_database.server.proxy() as proxy:
        async with mongo_persistence(mongo_database.url(proxy=proxy)) as persistence:
            backend = tools.backend(persistence)
            rows: Any = [message(f"m{n}", "y" * 1000) for n in range(1000)]
            await backend.commit_turn(
                TurnCommit(commit_id="c", thread_id="t", splice=Splice(keep_through=0, tail=rows))
            )
            before = proxy.bytes_sent, proxy.bytes_received
            receipt = await backend.commit_turn(tools.said("t", "new"))
            assert receipt.cut_id is not None
            assert proxy.bytes_sent - before[0] < 12_000
            assert proxy.bytes_received - before[1] < 12_000
            assert len(await backend.load_cut("t", receipt.cut_id)) == 1000


async def test_a_head_that_was_cut_often_is_small(plain: Persistence, tools: Any) -> None:
    """A hundred answers, each given twice: a range and a cut for each, some kilobytes."""
    backend = tools.backend(plain)
    for number in range(100):
        keep = 2**40
        for word in ("first", "second"):
            receipt = await backend.commit_turn(tools.said("t", f"{word}{number}", keep=keep))
            keep = receipt.newest - 1
    (head,) = await backend._db.find("chatkeep_threads", {})
    assert len(head["cuts"]) == 100
    assert len(head["live"]) == 200
    assert len(bson.encode(head)) < 16_000
