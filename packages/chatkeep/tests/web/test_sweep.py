"""The router ends the runs of servers that died, while it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette

from chatkeep import compose_persistence, define_run_store, memory_persistence
from chatkeep.backends import Persistence
from chatkeep.errors import CompositionError
from chatkeep.testkit.scripted import ScriptedModel
from chatkeep.web import ChatRouter, chat_router

pytestmark = pytest.mark.anyio
AGENT = {"adapter": ScriptedModel()}


@pytest.fixture
def persistence() -> Persistence:
    return memory_persistence()


def router(persistence: Persistence, seconds: float | None = 0.02) -> ChatRouter:
    return chat_router(persistence, AGENT, allow_anonymous=True, sweep_seconds=seconds)


async def lose(persistence: Persistence, run_id: str) -> None:
    """A run whose driver is gone: its lease of one millisecond has run out."""
    runs: Any = persistence.stores.runs
    await runs.create_or_resume(run_id, "t", started_at=1, lease_token="gone", lease_ms=1)
    await asyncio.sleep(0.005)


async def pause() -> None:
    await asyncio.sleep(0.005)


async def status(persistence: Persistence, run_id: str) -> str:
    runs: Any = persistence.stores.runs
    return (await runs.get(run_id)).status


async def ends_as_lost(persistence: Persistence, run_id: str) -> None:
    runs: Any = persistence.stores.runs
    async with asyncio.timeout(5):
        while (run := await runs.get(run_id)).status == "running":
            await pause()
    assert (run.status, run.error.code) == ("failed", "worker_lost")


def sweepers() -> list[asyncio.Task[Any]]:
    return [t for t in asyncio.all_tasks() if t.get_name() == "chatkeep sweeper"]


async def test_lost_runs_are_swept_from_the_start_on_and_again(
    persistence: Persistence, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has to remember it: the router's lifespan does it, and says so in the log."""
    await lose(persistence, "before")
    chats = router(persistence)
    app = Starlette(routes=chats.routes)
    async with chats.lifespan(app):
        await ends_as_lost(persistence, "before")
        await lose(persistence, "later")
        await ends_as_lost(persistence, "later")
    assert "run 'before' of thread 't' was lost" in caplog.text


async def test_the_first_sweep_does_not_wait_for_a_long_interval(
    persistence: Persistence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart is when runs are lost."""
    waits: list[float] = []
    real = asyncio.sleep

    async def quick(seconds: float, *args: Any) -> None:
        if seconds > 0.1:
            waits.append(seconds)
        await real(min(seconds, 0.001))

    await lose(persistence, "r")
    monkeypatch.setattr(asyncio, "sleep", quick)
    async with router(persistence, 3600):
        await ends_as_lost(persistence, "r")
        async with asyncio.timeout(5):
            while len(waits) < 2:
                await real(0.001)
    assert 0 < waits[0] <= 5
    assert 3240 <= waits[1] <= 3960


async def test_a_sweep_that_fails_is_logged_and_tried_again(
    persistence: Persistence, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A database that is down for a moment ends neither the server nor the sweeping."""
    backend = type(persistence.backends[0])
    list_lost: Callable[..., Any] = backend.list_lost
    failures = 0

    async def down(*args: Any, **options: Any) -> Any:
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise OSError("the cable")
        return await list_lost(*args, **options)

    monkeypatch.setattr(backend, "list_lost", down)
    await lose(persistence, "r")
    async with router(persistence):
        await ends_as_lost(persistence, "r")
    assert caplog.text.count("could not be swept") == 2
    assert "the cable" in caplog.text


async def test_it_stops_with_the_router_and_starts_again_with_it(
    persistence: Persistence,
) -> None:
    chats = router(persistence)
    assert sweepers() == []
    for run_id in ("first", "second"):
        async with chats:
            assert len(sweepers()) == 1
            async with chats:
                assert len(sweepers()) == 1
        assert sweepers() == []
        await lose(persistence, run_id)
        await asyncio.sleep(0.06)
        assert await status(persistence, run_id) == "running"


async def test_it_ends_when_the_persistence_was_closed_first(
    persistence: Persistence, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, not one a minute."""
    async with router(persistence):
        await persistence.aclose()
        (task,) = sweepers()
        await asyncio.wait({task}, timeout=5)
        assert task.done()
    assert caplog.text.count("no longer swept") == 1


async def test_without_an_interval_or_leases_nothing_is_swept(persistence: Persistence) -> None:
    """Somebody else does it; or the runs are in a store of the user's own, which has no leases."""

    async def nothing(*_args: Any, **_options: Any) -> None:
        return None

    own = define_run_store(
        create_or_resume=nothing, update=nothing, get=nothing, find_active_run=nothing
    )
    mixed = compose_persistence(persistence, overrides={"runs": own})
    for chats in (router(persistence, None), router(mixed)):
        async with chats:
            assert sweepers() == []


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), True, "60"])
def test_an_interval_that_is_none_is_refused(persistence: Persistence, wrong: Any) -> None:
    with pytest.raises(CompositionError, match="sweep_seconds"):
        router(persistence, wrong)
