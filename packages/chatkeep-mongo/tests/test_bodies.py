"""Bodies of any length: no document comes near MongoDB's limit, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep import Persistence
from chatkeep.errors import CorruptRecord, InvalidValue
from chatkeep.records import ActivityRecord, InterruptRecord, RunPatch
from chatkeep.rules import encode_cursor
from chatkeep.stores import (
    ActivitiesWrite,
    InterruptAnswer,
    RunStart,
    Splice,
    TurnCommit,
    ViewQuery,
)
from chatkeep_mongo import bodies
from chatkeep_mongo.bodies import put_body, split_pieces
from chatkeep_mongo.layout import COLLECTIONS, PIECES
from servers.mongo import MongoDatabase

pytestmark = pytest.mark.anyio


def assistant(name: str, text: str = "x") -> Any:
    return {"id": name, "role": "assistant", "content": text}


@given(st.binary(max_size=300), st.integers(1, 64))
def test_pieces_are_the_whole_and_no_longer_than_they_may_be(data: bytes, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "INLINE", size)
        pieces = split_pieces(data, t="t", piece="p")
        document: dict[str, Any] = {}
        stored = put_body(document, data.hex().encode(), t="t", piece="p")
    assert b"".join(piece["data"] for piece in pieces) == data
    assert all(0 < len(piece["data"]) <= size for piece in pieces)
    assert [piece["i"] for piece in pieces] == list(range(len(pieces)))
    assert len({piece["_id"] for piece in pieces}) == len(pieces)
    keys = [piece["_id"] for piece in pieces]
    assert keys == sorted(keys)
    if stored:
        assert document["parts"] == len(stored)
        assert "body" not in document
    else:
        assert document == {"body": data.hex()}


def test_a_write_that_is_sent_again_meets_its_own_pieces_only() -> None:
    """Same contents, same names; other contents, other names: a piece is never written over."""
    names: set[str] = set()
    for body in (b"a" * bodies.INLINE + b"1", b"a" * bodies.INLINE + b"2"):
        again = [put_body({}, body, t="t", piece="p") for _ in range(2)]
        assert again[0] == again[1]
        names.add(again[0][0]["piece"])
    assert len(names) == 2


@pytest.mark.slow
async def test_messages_of_twenty_megabytes_round_trip(
    persistence: Persistence, mongo_database: MongoDatabase, tools: Any
) -> None:
    """In the transcript, a cut and a draft; and no document is larger than five megabytes."""
    backend = tools.backend(persistence)
    text = "\u00e9\U0001f600 twenty " * 1_500_000
    big = assistant("big", text)
    assert len(text.encode()) > 20_000_000
    await backend.commit_turn(
        TurnCommit(
            commit_id="c1", thread_id="t", run_id="r",
            splice=Splice(keep_through=0, tail=[assistant("small"), big]),
            run=RunStart(run_id="r", started_at=1),
        )
    )  # fmt: skip
    assert (await backend.read_view("t", ViewQuery())).messages == [assistant("small"), big]
    await backend.save_draft("t", "r", [big])
    assert (await backend.read_view("t", ViewQuery(drafts=True))).drafts[0].messages == [big]
    with mongo_database.opened() as database:
        sizes = [len(bson.encode(row)) for row in database[PIECES].find()]
    assert max(sizes) < 5_000_000
    assert len(sizes) >= 10
    cut = await backend.commit_turn(tools.said("t", "next", keep=1))
    assert await backend.load_cut("t", cut.cut_id) == [big]
    assert await backend.delete_thread("t")
    with mongo_database.opened() as database:
        assert database[PIECES].count_documents({}) == 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bodies go into pieces from two hundred bytes on."""
    monkeypatch.setattr("chatkeep_mongo.bodies.INLINE", 200)
    monkeypatch.setattr("chatkeep_mongo.lookups.INLINE", 200)
    return 200


async def everything(backend: Any, version: int) -> None:
    """A thread in which every kind of body is long; with another version, each is replaced."""
    text = f"{version} " * 150
    row = ActivityRecord(id="a", activity_type="x", content={"text": text}, index=0)
    asked = InterruptRecord(
        interrupt_id=f"i{version}", run_id="r", thread_id="t", requested_at=1, payload={"q": text}
    )
    await backend.commit_turn(
        TurnCommit(
            commit_id=f"c{version}",
            thread_id="t",
            run_id="r",
            splice=Splice(keep_through=0, tail=[assistant("m", text)], archive=False),
            run=RunPatch(usage={"text": text})
            if version
            else RunStart(run_id="r", started_at=1, extra={"text": text}),
            interrupts=[asked],
            activities=ActivitiesWrite(puts={0: row, 1: row}, length=2),
        )
    )
    await backend.save_draft("t", "r", [assistant("d", text)])
    await backend.metadata_put("n", "t", text, "*")


async def test_what_is_replaced_or_deleted_leaves_no_piece(
    plain: Persistence, mongo_database: MongoDatabase, tools: Any, short: int
) -> None:
    backend = tools.backend(plain)
    with mongo_database.opened() as database:

        def pieces() -> set[str]:
            return {row["piece"] for row in database[PIECES].find({}, {"piece": 1})}

        await everything(backend, 0)
        first = pieces()
        assert len(first) == 7
        for version in (1, 2):
            await everything(backend, version)
            assert len(pieces()) == 7 + version  # one more interrupt each
        assert not pieces() & first - {name for name in first if name.startswith("i")}
        view = await backend.read_view(
            "t", ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)
        )
        assert view.messages == [assistant("m", "2 " * 150)]
        assert view.runs[0].usage == {"text": "2 " * 150}
        assert [r.payload["q"] for r in view.interrupts] == [f"{v} " * 150 for v in range(3)]
        assert [a.content["text"] for a in view.activities] == ["2 " * 150] * 2
        assert view.drafts[0].messages == [assistant("d", "2 " * 150)]
        assert await backend.metadata_of("t") == {"n": "2 " * 150}
        await backend.commit_turn(
            TurnCommit(
                commit_id="end",
                thread_id="t",
                run_id="r",
                run=RunPatch(status="completed", usage=None),
                answers=[InterruptAnswer(interrupt_id="i0", response="short")],
                activities=ActivitiesWrite(puts={}, length=1),
                drop_draft=True,
            )
        )
        await backend.metadata_put("n", "t", 1, "*")
        left = sorted(name[0] for name in pieces())
        # A message, a UI row, the run (its long extra field), three long questions.
        assert left == ["a", "i", "i", "i", "m", "r"]
        await backend.erase_messages("t", ["m"])
        assert "m" not in {name[0] for name in pieces()}
        assert await backend.delete_thread("t")
        for name in COLLECTIONS:
            if name != "chatkeep_layout":
                assert database[name].count_documents({}) == 0, name


async def test_what_is_left_of_a_long_draft_after_an_erasure_stands_in_pieces_too(
    plain: Persistence, mongo_database: MongoDatabase, tools: Any, short: int
) -> None:
    """Else it might not fit into a document; and what is left of it may well be short."""
    backend = tools.backend(plain)
    await backend.commit_turn(
        TurnCommit(commit_id="c", thread_id="t", run=RunStart(run_id="r", started_at=1))
    )
    messages = [assistant("x"), assistant("y", "y" * 300), assistant("z", "z" * 300)]
    await backend.save_draft("t", "r", messages)
    with mongo_database.opened() as database:
        for erased, parts in (("x", 4), ("y", 2), ("z", 0)):
            await backend.erase_messages("t", [erased])
            messages = [message for message in messages if message["id"] != erased]
            view = await backend.read_view("t", ViewQuery(drafts=True))
            assert view.drafts[0].messages == messages
            assert database[PIECES].count_documents({}) == parts
            assert all(len(bson.encode(row)) < 1000 for row in database["chatkeep_runs"].find())


async def test_a_missing_piece_is_corruption_and_not_a_shorter_message(
    plain: Persistence, mongo_database: MongoDatabase, tools: Any, short: int
) -> None:
    backend = tools.backend(plain)
    await everything(backend, 0)
    with mongo_database.opened() as database:
        database[PIECES].delete_one({"piece": {"$regex": "^m"}, "i": 1})
    with pytest.raises(CorruptRecord, match="thread 't'"):
        await backend.read_view("t", ViewQuery())


async def test_an_erasure_of_much_leaves_the_head_short(
    plain: Persistence, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has to do stands in a piece while it is at work, as that of a commit does."""
    monkeypatch.setattr("chatkeep_mongo.redo.STAGE_ABOVE", 200)
    backend, watch = tools.watched(plain)
    tail = [assistant(f"m{n}") for n in range(40)]
    await backend.commit_turn(
        TurnCommit(commit_id="c", thread_id="t", splice=Splice(keep_through=0, tail=tail))
    )
    seen: list[dict[str, Any]] = []

    async def pause(name: str, where: str) -> None:
        if (name, where) == ("delete", "chatkeep_entries"):
            seen.extend(await tools.backend(plain)._db.find("chatkeep_threads", {}))

    watch.pause = pause
    assert await backend.erase_messages("t", [f"m{n}" for n in range(0, 40, 2)]) == 20
    assert seen
    assert all(len(bson.encode(head["redo"])) < 200 for head in seen)
    assert (await backend.read_view("t", ViewQuery())).messages == tail[1::2]
    assert await tools.backend(plain)._db.find(PIECES, {}) == []


async def test_an_erasure_that_meets_a_draft_without_its_pieces_says_so(
    plain: Persistence, mongo_database: MongoDatabase, tools: Any, short: int
) -> None:
    """It cannot promise that the message is gone, and does not try for ever."""
    backend = tools.backend(plain)
    await everything(backend, 0)
    with mongo_database.opened() as database:
        database[PIECES].delete_one({"piece": {"$regex": "^d"}, "i": 1})
    with pytest.raises(CorruptRecord, match="a draft"):
        await backend.erase_messages("t", ["d"])


@pytest.mark.parametrize(
    ("collection", "query"),
    [
        ("chatkeep_entries", {"n": 2}),
        ("chatkeep_runs", {}),
        ("chatkeep_interrupts", {}),
        ("chatkeep_activities", {"position": 0}),
    ],
)
async def test_a_document_that_is_gone_is_corruption_and_not_absence(
    plain: Persistence, mongo_database: MongoDatabase, tools: Any, collection: str, query: Any
) -> None:
    """Somebody deleted it by hand: the thread is not read as if it had never been there."""
    backend = tools.backend(plain)
    row = ActivityRecord(id="a", activity_type="x", content={}, index=0)
    asked = InterruptRecord(interrupt_id="i", run_id="r", thread_id="t", requested_at=1, payload={})
    await backend.commit_turn(
        TurnCommit(
            commit_id="c",
            thread_id="t",
            run_id="r",
            splice=Splice(keep_through=0, tail=[assistant("a"), assistant("b")]),
            run=RunStart(run_id="r", started_at=1),
            interrupts=[asked],
            activities=ActivitiesWrite(puts={0: row, 1: row}, length=2),
        )
    )
    with mongo_database.opened() as database:
        assert database[collection].delete_one(query).deleted_count == 1
    with pytest.raises(CorruptRecord, match="thread 't'"):
        await backend.read_view("t", ViewQuery(runs="all", interrupts="all", activities=True))


async def test_keys_of_any_kind_survive(persistence: Persistence) -> None:
    """Dots, dollars, nothing, ``_id``: bodies are text to the database."""
    odd = {"$schema": "x", "a.b": 1, "": 2, "_id": 3, "$where": "1", "z": {"$ne": None, "x.y": []}}
    stores = persistence.stores
    rows: Any = [{"id": "m", "role": "assistant", "content": "x", "toolArgs": odd}]
    await stores.messages.save_thread("t", rows)
    assert await stores.messages.load_thread("t") == rows
    await stores.activities.save_activities(
        "t", [ActivityRecord(id="a", activity_type="x", content=odd, index=0)]
    )
    assert (await stores.activities.load_activities("t"))[0].content == odd
    await stores.metadata.set("n.$s", "a.b", odd)
    assert await stores.metadata.get("n.$s", "a.b") == odd
    await stores.metadata.delete("n.$s", "a.b")
    assert await stores.metadata.get("n.$s", "a.b") is None
    asked = InterruptRecord(
        interrupt_id="$i.1", run_id="$r", thread_id="t", requested_at=1, payload=odd
    )
    await stores.interrupts.create(asked)
    await stores.interrupts.resolve("t", "$i.1", {"$set": odd})
    (record,) = await stores.interrupts.list("t")
    assert (record.payload, record.response) == (odd, {"$set": odd})
    await stores.runs.create_or_resume("$run", "t", started_at=1, lease_token="$token")
    run = await stores.runs.get("$run")
    assert run is not None
    assert run.lease is not None
    assert run.lease.token == "$token"


@pytest.mark.parametrize("parts", [(2**63, 1), (1, 2**63), (-1, 1), (2**64 - 1, 0)])
async def test_a_cursor_that_no_document_can_have_is_refused(
    plain: Persistence, parts: tuple[int, int]
) -> None:
    with pytest.raises(InvalidValue, match="cursor"):
        await plain.list_threads(cursor=encode_cursor(*parts))
