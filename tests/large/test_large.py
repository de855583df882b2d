"""Long threads, large messages and many conversations at once work, with bounded memory."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chatkeep import Persistence, memory_persistence
from chatkeep.backends import Backend, new_commit_id
from chatkeep.records import ModelMessage, RunPatch
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_sql import postgres_persistence, sqlite_persistence
from servers import Database

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

MB = 1 << 20

BACKENDS = [
    "memory",
    pytest.param("sqlite", marks=pytest.mark.sqlite),
    pytest.param("psycopg", marks=pytest.mark.postgres),
    pytest.param("asyncpg", marks=pytest.mark.postgres),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=BACKENDS)
async def persistence(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Persistence]:
    if request.param == "memory":
        opened = memory_persistence()
    elif request.param == "sqlite":
        opened = sqlite_persistence(tmp_path / "chat.db")
    else:
        database: Database = request.getfixturevalue("postgres_database")
        opened = postgres_persistence(database.url(request.param))
    async with opened:
        await opened.migrate()
        yield opened


@pytest.fixture
def backend(persistence: Persistence) -> Backend:
    return persistence.backends[0]


def messages(count: int, *, first: int = 0, size: int = 1000) -> list[ModelMessage]:
    return [
        {"id": f"m{n}", "role": "assistant" if n % 2 else "user", "content": f"{n} " + "x" * size}
        for n in range(first, first + count)
    ]


async def turn(backend: Backend, thread: str, number: int = 0) -> None:
    """A user's message and an answer, as two boundaries."""
    run = f"{thread}/run-{number}"
    view = await backend.read_view(thread, ViewQuery(messages="none"))
    asked, answered = messages(2, first=1_000_000 + 2 * number)
    started = await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            run_id=run,
            run=RunStart(run_id=run, started_at=1, lease_token="t"),
            splice=Splice(keep_through=view.newest, tail=[asked], expected=view.revision),
        )
    )
    await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            run_id=run,
            lease_token="t",
            run=RunPatch(status="completed", finished_at=2),
            splice=Splice(keep_through=started.newest, tail=[answered], expected=started.revision),
        )
    )


async def test_a_thread_of_20_000_messages_is_stored_read_paged_and_continued(
    persistence: Persistence, backend: Backend
) -> None:
    store: Any = persistence.stores.messages
    long = messages(20_000, size=200)
    await store.save_thread("t", long)
    await turn(backend, "t")

    loaded = await store.load_thread("t")
    assert loaded[:20_000] == long
    assert len(loaded) == 20_002

    page = await store.load_page("t", limit=50)
    assert page.messages == loaded[-50:]
    older = await store.load_page("t", limit=50, before=page.cursor)
    assert older.messages == loaded[-100:-50]

    await store.save_thread("t", loaded[:10])
    assert await store.load_thread("t") == loaded[:10]
    [cut] = await store.list_cuts("t")
    assert len(cut.numbers) == 19_992
    assert await persistence.delete_thread("t")


async def test_a_message_of_20_mb_comes_back_whole(
    persistence: Persistence, backend: Backend
) -> None:
    store: Any = persistence.stores.messages
    big: ModelMessage = {
        "id": "big",
        "role": "user",
        "content": [{"type": "image", "source": {"type": "data", "value": "é\n" * (7 * MB)}}],
    }
    assert len(json.dumps(big, ensure_ascii=False).encode()) > 20 * MB
    await store.save_thread("t", [big])
    await turn(backend, "t")
    loaded = await store.load_thread("t")
    assert loaded[0] == big
    assert len(loaded) == 3


async def test_a_page_of_a_long_thread_does_not_load_the_thread(
    persistence: Persistence,
) -> None:
    store: Any = persistence.stores.messages
    await store.save_thread("t", messages(2_000, size=10_000))
    await store.load_page("t", limit=20)
    tracemalloc.start()
    try:
        page = await store.load_page("t", limit=20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(page.messages) == 20
    # Twenty messages have 200 KB, the thread has 20 MB.
    assert peak < 3 * MB


async def test_1_000_conversations_at_once_all_end_whole(backend: Backend) -> None:
    tracemalloc.start()
    try:
        await asyncio.gather(*(turn(backend, f"t{n}") for n in range(1_000)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    views = [await backend.read_view(f"t{n}", ViewQuery()) for n in range(1_000)]
    assert all(len(view.messages) == 2 and not view.runs for view in views)
    assert peak < 200 * MB
