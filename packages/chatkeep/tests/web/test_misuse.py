"""What a newcomer gets wrong: said when the router is made, or loudly, and never open to all."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import BaseEvent
from starlette.requests import Request
from starlette.responses import Response

from chatkeep import memory_persistence, with_persistence
from chatkeep.backends import Persistence
from chatkeep.delivery import Delivery, RunKey
from chatkeep.engine import ChatStream, chat
from chatkeep.errors import CompositionError, ToolError
from chatkeep.scope import Scope
from chatkeep.testkit.scripted import ScriptedModel, scripted_interrupts, scripted_tools
from chatkeep.web import ChatParams, chat_router, reconstruct_chat, sse_response

from .conftest import Answer, Watched, request

pytestmark = pytest.mark.anyio


def body(run_id: str = "r") -> dict[str, Any]:
    row = {"id": f"u-{run_id}", "role": "user", "content": "hi"}
    return {"threadId": "t", "runId": run_id, "messages": [row]}


def agent(params: ChatParams) -> ChatStream:
    keep = with_persistence(params.persistence)
    return chat(adapter=ScriptedModel(), middleware=[keep], **params.chat_kwargs())


@pytest.fixture
def persistence() -> Persistence:
    return memory_persistence()


async def every_route(chats: Any) -> list[Answer]:
    return [
        await request(chats, "POST", json_body=body()),
        await request(chats, query={"threadId": "t"}),
        await request(chats, query={"offset": "-1", "runId": "r"}),
    ]


# ---------------------------------------------------------------------------------- scope


@pytest.mark.parametrize("found", [None, Scope()])
async def test_a_scope_function_that_finds_nobody_is_403(
    persistence: Persistence, found: Scope | None
) -> None:
    """Nobody is logged in: rows without a scope are not theirs either."""
    assert persistence.stores.messages is not None
    await persistence.stores.messages.save_thread("t", [{"role": "user", "content": "secret"}])

    async def later(_: Request) -> Scope | None:
        return found

    for scope in (later, lambda _: found):
        async with chat_router(persistence, agent, scope=scope) as chats:
            for answer in await every_route(chats):
                assert (answer.status, answer.json) == (403, {"error": "Forbidden"})
    assert len(await persistence.stores.messages.load_thread("t")) == 1


async def test_nobody_works_without_a_scope_where_something_else_decides(
    persistence: Persistence,
) -> None:
    """Anonymous use that was asked for, or an authorize that is asked as always."""
    async with chat_router(persistence, agent, scope=lambda _: None, allow_anonymous=True) as chats:
        assert (await request(chats, "POST", json_body=body())).status == 200
    async with chat_router(
        persistence, agent, scope=lambda _: Scope(), authorize=lambda *_: False
    ) as chats:
        assert (await request(chats, query={"threadId": "t"})).status == 403


async def test_a_scope_function_that_finds_text_is_a_logged_500(
    persistence: Persistence, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: Any = lambda _: "ada"  # noqa: E731
    async with chat_router(persistence, agent, scope=wrong, allow_anonymous=True) as chats:
        for answer in await every_route(chats):
            assert (answer.status, answer.json["code"]) == (500, "composition-error")
    assert "it found str" in caplog.text


@pytest.mark.parametrize("wrong", ["ada", {"user_id": "ada"}, 7, Scope()])
def test_a_scope_that_is_none_is_refused_at_once(persistence: Persistence, wrong: Any) -> None:
    """Neither a scope nor a function; and an empty one keeps nobody apart."""
    with pytest.raises(CompositionError, match="scope"):
        chat_router(persistence, agent, scope=wrong)


# ------------------------------------------------------------------------------ authorize


@pytest.mark.parametrize("verdict", ["no", "", 1, 0, None, [], object()])
async def test_a_verdict_that_is_no_verdict_lets_nobody_in(
    persistence: Persistence, verdict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """``"no"`` is true in Python. It is a mistake of the application, so 500 and the log."""

    async def later(_thread_id: str, _request: Request) -> Any:
        return verdict

    for authorize in (lambda *_: verdict, later):
        async with chat_router(persistence, agent, authorize=authorize) as chats:
            answers = (await every_route(chats))[:2]
        assert [(a.status, a.json["code"]) for a in answers] == [(500, "composition-error")] * 2
    assert "authorize must return True, False or a response" in caplog.text
    assert persistence.stores.messages is not None
    assert await persistence.stores.messages.load_thread("t") == []


async def test_a_hand_made_page_load_refuses_it_the_same_way(persistence: Persistence) -> None:
    wrong: Any = lambda *_: "no"  # noqa: E731

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = Request(scope, receive)
        response: Response = await reconstruct_chat(persistence, asked, authorize=wrong)
        await response(scope, receive, send)

    answer = await request(app, query={"threadId": "t"})
    assert (answer.status, answer.json["code"]) == (500, "composition-error")


def test_an_authorize_that_cannot_be_called_is_refused_at_once(persistence: Persistence) -> None:
    wrong: Any = True
    with pytest.raises(CompositionError, match="authorize"):
        chat_router(persistence, agent, authorize=wrong)


# ---------------------------------------------------------------------------------- agent

MODEL = ScriptedModel()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (MODEL, "ScriptedModel"),
        (None, "NoneType"),
        ([MODEL], "list"),
        ({}, "adapter"),
        ({"tools": []}, "adapter"),
        ({"adapter": "gpt"}, "adapter"),
        ({"adapter": MODEL, "model": "x", "temprature": 1}, "model, temprature"),
        ({"adapter": MODEL, "thread_id": "t"}, "thread_id"),
        ({"adapter": MODEL, "messages": [], "run_id": "r"}, "messages, run_id"),
        ({"adapter": MODEL, "middleware": ["keep"]}, "middleware"),
        ({"adapter": MODEL, "middleware": with_persistence(memory_persistence())}, "middleware"),
    ],
)
def test_an_agent_that_could_serve_nobody_is_refused_at_once(
    persistence: Persistence, wrong: Any, says: str
) -> None:
    """When the app is built, with the word to look for; not by every request."""
    with pytest.raises(CompositionError, match=says):
        chat_router(persistence, wrong, allow_anonymous=True)


def test_wrong_tools_are_refused_at_once(persistence: Persistence) -> None:
    twice = [*scripted_tools(), *scripted_tools()]
    with pytest.raises(ToolError):
        chat_router(persistence, {"adapter": MODEL, "tools": twice}, allow_anonymous=True)


@pytest.mark.parametrize("wrong", [[1], [*scripted_interrupts()] * 2])
def test_wrong_definitions_of_interrupts_are_refused_at_once(
    persistence: Persistence, wrong: Any
) -> None:
    with pytest.raises(ToolError, match="interrupt definition"):
        chat_router(persistence, {"adapter": MODEL, "interrupts": wrong}, allow_anonymous=True)


async def _forgets(_: ChatParams) -> None:
    """Makes a stream, and forgets to return it."""


@pytest.mark.parametrize("wrong", [_forgets, lambda _: None, lambda _: "hi", lambda _: iter([])])
async def test_an_agent_that_returns_no_stream_is_a_logged_500(
    persistence: Persistence, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No empty stream, and no run that waits to be watched."""
    async with chat_router(persistence, wrong, allow_anonymous=True) as chats:
        answer = await request(chats, "POST", json_body=body())
        assert await chats.delivery.find(RunKey(run_id="r")) is None
    assert (answer.status, answer.json["code"]) == (500, "composition-error")
    assert "async iterator" in caplog.text


async def test_what_is_no_stream_is_neither_sent_nor_driven() -> None:
    wrong: Any = None
    with pytest.raises(CompositionError, match="async iterator"):
        sse_response(wrong)
    async with Delivery() as delivery:
        with pytest.raises(CompositionError, match="async iterator"):
            sse_response(wrong, delivery=delivery)
        with pytest.raises(CompositionError, match="async iterator"):
            await delivery.start(wrong, key=RunKey(run_id="r"), thread_id="t")
        assert await delivery.find(RunKey(run_id="r")) is None


async def test_an_agent_that_stores_nothing_is_warned_about_once(
    persistence: Persistence, caplog: pytest.LogCaptureFixture
) -> None:
    """Its chat looks fine until the page is loaded again."""

    def forgetful(params: ChatParams) -> ChatStream:
        return chat(adapter=ScriptedModel(), **params.chat_kwargs())

    async with chat_router(persistence, forgetful, allow_anonymous=True) as chats:
        for run_id in ("a", "b"):
            answer = await request(chats, "POST", json_body=body(run_id))
            assert answer.types[-1] == "RUN_FINISHED"
    (record,) = [r for r in caplog.records if "not stored" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert "with_persistence(params.persistence)" in record.getMessage()


async def test_an_agent_that_stores_or_cannot_be_seen_into_is_not_warned_about(
    persistence: Persistence, caplog: pytest.LogCaptureFixture
) -> None:
    def foreign(params: ChatParams) -> AsyncIterator[BaseEvent]:
        return Watched("a", run_id=params.run_id)

    agents: list[Any] = [agent, {"adapter": ScriptedModel()}, foreign]
    for i, each in enumerate(agents):
        async with chat_router(persistence, each, allow_anonymous=True) as chats:
            await request(chats, "POST", json_body=body(f"r{i}"))
    assert "not stored" not in caplog.text


async def test_a_post_to_a_router_that_has_closed_is_503_and_no_failure(
    persistence: Persistence, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests come in while a server shuts down: one line in the log, and no error."""
    chats = chat_router(persistence, agent, allow_anonymous=True)
    await chats.aclose()
    answer = await request(chats, "POST", json_body=body())
    assert (answer.status, answer.json["code"]) == (503, "store-closed")
    (record,) = [r for r in caplog.records if "was refused" in r.getMessage()]
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)


# ----------------------------------------------------------------------------------- path


@pytest.mark.parametrize("path", ["api/chat", "", None])
def test_a_path_without_its_slash_is_refused(persistence: Persistence, path: Any) -> None:
    with pytest.raises(CompositionError, match="slash"):
        chat_router(persistence, agent, allow_anonymous=True, path=path)
