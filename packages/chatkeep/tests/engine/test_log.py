"""What code of an application raises stands in the log, once, with its traceback."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent

from chatkeep.engine import (
    ChatContext,
    ChatMiddleware,
    Event,
    FinishInfo,
    ModelRequest,
    chat,
    model_finished,
)
from chatkeep.errors import BackendUnavailable, CompositionError, ProviderError
from chatkeep.testkit.played import PlayedModel, collect

pytestmark = pytest.mark.anyio


class Boom(Exception):
    pass


class Panic(BaseException):
    pass


def model(error: BaseException | None = None) -> PlayedModel:
    async def turn(request: ModelRequest) -> AsyncIterator[Event]:
        if error is not None:
            raise error
        yield model_finished(request, "stop")

    return PlayedModel(turn)


async def run(adapter: Any, *middleware: ChatMiddleware) -> Any:
    events = await collect(
        chat(adapter=adapter, messages=[], thread_id="t", run_id="r", middleware=middleware)
    )
    return events[-1].model_dump(mode="json", by_alias=True)


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str, Any]]:
    return [
        (r.levelno, r.getMessage(), r.exc_info[1] if r.exc_info else None)
        for r in caplog.records
        if r.name == "chatkeep.engine"
    ]


async def test_an_adapters_exception_is_logged_with_run_and_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = Boom("no model today")
    last = await run(model(error))
    assert last["message"] == "no model today"
    assert records(caplog) == [(logging.ERROR, "the run failed (run 'r' of thread 't')", error)]


@pytest.mark.parametrize("hook", ["setup", "on_config", "on_start", "on_chunk", "on_usage"])
async def test_an_exception_of_a_hook_is_logged(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = Boom(hook)

    async def fails(*_: Any) -> None:
        raise error

    usage = {"promptTokens": 1, "completionTokens": 1, "totalTokens": 2}

    async def turn(request: ModelRequest) -> AsyncIterator[Event]:
        yield model_finished(request, "stop", usage=usage)

    middleware = type("Fails", (ChatMiddleware,), {hook: fails})()
    assert (await run(PlayedModel(turn), middleware))["type"] == "RUN_ERROR"
    assert [error for _, _, error in records(caplog)] == [error]


async def test_an_exception_of_a_terminal_hook_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(ChatMiddleware):
        async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
            raise Boom("late")

    assert (await run(model(), Fails()))["message"] == "late"
    (only,) = records(caplog)
    assert "on_finish of middleware Fails failed" in only[1]


async def test_what_is_no_exception_is_logged_with_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    panic = Panic("p")
    with pytest.raises(Panic):
        await run(model(panic))
    ((_, _, error),) = records(caplog)
    assert error.__cause__ is panic


@pytest.mark.parametrize(
    "error",
    [ProviderError("busy", provider_code="529"), CompositionError("x")],
    ids=["provider", "refusal"],
)
async def test_what_run_error_tells_whole_is_not_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await run(model(error)))["type"] == "RUN_ERROR"
    assert records(caplog) == []


async def test_an_error_that_the_model_reports_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (await run(PlayedModel([RunErrorEvent(message="overloaded")])))["type"] == "RUN_ERROR"
    assert records(caplog) == []


async def test_a_store_that_fails_a_run_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    await run(model(BackendUnavailable("db-7 is down")))
    assert [text for _, text, _ in records(caplog)] == ["a store failed a run: db-7 is down"]


async def test_what_is_raised_after_an_abort_is_there_for_who_looks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients of models raise when their request is aborted: no warning, but no silence."""
    error = Boom("aborted underneath")

    class Aborts(ChatMiddleware):
        async def on_start(self, ctx: ChatContext) -> None:
            ctx.abort("enough")
            raise error

    with caplog.at_level(logging.INFO, logger="chatkeep.engine"):
        assert (await run(model(), Aborts()))["outcome"] == {"type": "cancelled"}
    ((level, _, seen),) = records(caplog)
    assert (level, seen) == (logging.INFO, error)
