"""The routes of a chat: who may, what starts a run, what only watches, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import BaseEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount

from chatkeep import compose_persistence, define_activity_store, memory_persistence
from chatkeep.backends import Persistence
from chatkeep.engine import ChatStream, chat
from chatkeep.errors import BackendUnavailable, CompositionError
from chatkeep.persistence import with_persistence
from chatkeep.records import RunPatch
from chatkeep.scope import Scope
from chatkeep.testkit.scripted import ScriptedModel
from chatkeep.web import CORS_OPTIONS, ChatParams, ChatRouter, chat_router

from .conftest import Answer, Watched, open_request, request

pytestmark = pytest.mark.anyio
MESSAGE = {"id": "u1", "role": "user", "content": "hi"}


def body(run_id: str = "r", thread_id: str = "t", **fields: Any) -> dict[str, Any]:
    return {"threadId": thread_id, "runId": run_id, "messages": [MESSAGE], **fields}


class Agent:
    """Makes a watched stream for every run, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[ChatParams] = []
        self.streams: list[Watched] = []
        self.gate: asyncio.Event | None = None

    def __call__(self, params: ChatParams) -> AsyncIterator[BaseEvent]:
        self.calls.append(params)
        stream = Watched("a", gate=self.gate, run_id=params.run_id)
        stream.thread_id = params.thread_id
        self.streams.append(stream)
        return stream


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def persistence() -> Persistence:
    return memory_persistence()


@pytest.fixture
async def chats(agent: Agent, persistence: Persistence) -> AsyncIterator[ChatRouter]:
    async with chat_router(persistence, agent, allow_anonymous=True, drain=0.1) as router:
        yield router


def problem(answer: Answer) -> tuple[int, str]:
    """Status and code of a refusal; its shape is checked on the way."""
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json["status"] == answer.status
    assert set(answer.json) == {"type", "title", "status", "detail", "code"}
    return answer.status, answer.json["code"]


# ------------------------------------------------------------------------------- posting


async def test_a_post_starts_a_run_and_streams_it(chats: ChatRouter, agent: Agent) -> None:
    answer = await request(chats, "POST", json_body=body())
    assert answer.status == 200
    assert answer.types[0] == "RUN_STARTED"
    assert answer.types[-1] == "RUN_FINISHED"
    (params,) = agent.calls
    assert params.thread_id == "t"
    assert params.request is not None
    assert params.persistence.stores.messages is not None
    assert params.abort is not None


@pytest.mark.parametrize(
    "raw", [b"", b"{nope", b"[]", b'{"messages":[]}', b'{"threadId":"\xff"}', b"[" * 5000]
)
async def test_a_bad_body_is_400_and_touches_nothing(
    chats: ChatRouter, agent: Agent, raw: bytes
) -> None:
    answer = await request(chats, "POST", body=raw)
    assert problem(answer) == (400, "bad-request")
    assert agent.calls == []
    assert len(chats.delivery.log) == 0  # type: ignore[arg-type]


async def test_a_body_above_the_limit_is_413(agent: Agent, persistence: Persistence) -> None:
    """Refused by its declared length, or as soon as that much has come."""
    chats = chat_router(persistence, agent, allow_anonymous=True, max_body_bytes=100)
    declared = await request(chats, "POST", body=b"x", headers={"content-length": "101"})
    streamed = await request(chats, "POST", body=b"x" * 101)
    assert problem(declared) == problem(streamed) == (413, "body-too-large")
    assert agent.calls == []


async def test_a_repeated_post_replays_and_starts_nothing(chats: ChatRouter, agent: Agent) -> None:
    """The same bytes again give the same events under the same ids."""
    first = await request(chats, "POST", json_body=body())
    second = await request(chats, "POST", json_body=body())
    assert second.body == first.body
    assert len(agent.calls) == 1


async def test_the_same_post_many_times_at_once_runs_once(chats: ChatRouter, agent: Agent) -> None:
    """Of simultaneous posts of one run one starts it, all show it."""
    answers = await asyncio.gather(*(request(chats, "POST", json_body=body()) for _ in range(20)))
    assert {answer.body for answer in answers} == {answers[0].body}
    assert answers[0].types[-1] == "RUN_FINISHED"
    assert [stream.end for stream in agent.streams].count("finished") == 1


async def test_a_run_id_of_another_thread_is_409(chats: ChatRouter, agent: Agent) -> None:
    """A run belongs to its thread; the post of another one is refused before it starts."""
    await request(chats, "POST", json_body=body())
    answer = await request(chats, "POST", json_body=body(thread_id="other"))
    assert problem(answer) == (409, "run-conflict")
    assert len(agent.calls) == 1


@pytest.mark.parametrize("status", ["running", "completed", "failed", "aborted"])
async def test_a_stored_run_that_this_process_does_not_know_is_409(
    chats: ChatRouter, agent: Agent, persistence: Persistence, status: str
) -> None:
    """It was started elsewhere: never again here, and its events are not here either."""
    runs = persistence.stores.runs
    assert runs is not None
    await runs.create_or_resume("r", "t", started_at=1)
    if status != "running":
        await runs.update("r", RunPatch(status=status, finished_at=2))  # type: ignore[arg-type]
    answer = await request(chats, "POST", json_body=body())
    assert problem(answer) == (409, "run-conflict")
    assert agent.calls == []


async def test_a_stored_run_of_another_thread_is_409(
    chats: ChatRouter, agent: Agent, persistence: Persistence
) -> None:
    runs = persistence.stores.runs
    assert runs is not None
    await runs.create_or_resume("r", "other", started_at=1)
    answer = await request(chats, "POST", json_body=body())
    assert problem(answer) == (409, "run-conflict")
    assert agent.calls == []


async def test_a_parked_run_may_be_taken_up_under_its_own_id(
    chats: ChatRouter, persistence: Persistence
) -> None:
    """A client may continue a paused run under the same id; the engine decides."""
    runs = persistence.stores.runs
    assert runs is not None
    await runs.create_or_resume("r", "t", started_at=1)
    await runs.update("r", RunPatch(status="interrupted"))
    answer = await request(chats, "POST", json_body=body())
    assert answer.status == 200


async def test_a_database_that_is_down_is_503_without_its_name(
    chats: ChatRouter, agent: Agent, persistence: Persistence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The problem has the code; hosts and drivers stay in the server's log."""

    async def down(*args: Any, **kwargs: Any) -> None:
        raise BackendUnavailable("db-7.internal:5432 refused")

    monkeypatch.setattr(type(persistence.stores.runs), "get", down)
    answer = await request(chats, "POST", json_body=body())
    assert problem(answer) == (503, "backend-unavailable")
    assert b"db-7" not in answer.body
    assert agent.calls == []


async def test_a_closed_router_takes_no_more_runs(chats: ChatRouter, agent: Agent) -> None:
    await request(chats, "POST", json_body=body())
    await chats.aclose()
    answer = await request(chats, "POST", json_body=body("r2"))
    assert problem(answer) == (503, "store-closed")
    assert [stream.end for stream in agent.streams] == ["finished", "never started"]


async def test_leaving_stops_nothing_and_a_second_tab_sees_everything(
    chats: ChatRouter, agent: Agent
) -> None:
    """The run outlives the response that started it."""
    agent.gate = asyncio.Event()
    first, task = open_request(chats, "POST", json_body=body())
    await first.until(lambda a: b'"a"' in a.body)
    first.leave.set()
    await task
    second, watching = open_request(chats, query={"offset": "-1", "runId": "r"})
    await second.until(lambda a: b'"a"' in a.body)
    agent.gate.set()
    await watching
    assert second.types[-1] == "RUN_FINISHED"
    assert second.body.startswith(first.body)
    assert agent.streams[0].end == "finished"


async def test_a_socket_that_closes_stops_the_run_where_that_is_asked_for(
    persistence: Persistence,
) -> None:
    """``on_disconnect="abort"``: also for those who watch; one of them who leaves stops nothing,
    nor does a repeated post that does."""

    def slow(run_id: str, chunks: int) -> dict[str, Any]:
        text = f'SCENARIO:slow {{"chunks": {chunks}, "delayMs": 10}}'
        return body(run_id, run_id, messages=[{"id": "u1", "role": "user", "content": text}])

    async with chat_router(
        persistence, {"adapter": ScriptedModel()}, allow_anonymous=True, on_disconnect="abort"
    ) as chats:
        first, posting = open_request(chats, "POST", json_body=slow("r", 1000))
        await first.until(lambda a: b"w0" in a.body)
        joined: dict[str, Any] = {"query": {"offset": "-1", "runId": "r"}}
        repeated: dict[str, Any] = {"method": "POST", "json_body": slow("r", 1000)}
        for others in (joined, repeated):
            other, watching = open_request(chats, **others)
            await other.until(lambda a: b"w0" in a.body)
            other.leave.set()
            await watching
        last, watching = open_request(chats, **joined)
        await last.until(lambda a: b"w5" in a.body)
        first.leave.set()
        await posting
        await watching
        assert last.events[-1]["outcome"] == {"type": "cancelled"}
        runs: Any = persistence.stores.runs
        assert (await runs.get("r")).status == "aborted"
        await request(chats, "POST", json_body=slow("r2", 3))
        assert (await runs.get("r2")).status == "completed"


def test_what_a_closed_socket_means_is_one_of_two(agent: Agent, persistence: Persistence) -> None:
    wrong: Any = "stop"
    with pytest.raises(CompositionError, match="'detach' or 'abort'"):
        chat_router(persistence, agent, allow_anonymous=True, on_disconnect=wrong)


async def test_an_async_agent_is_awaited(persistence: Persistence) -> None:
    async def agent(params: ChatParams) -> AsyncIterator[BaseEvent]:
        await asyncio.sleep(0)
        return Watched("x", run_id=params.run_id)

    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        answer = await request(chats, "POST", json_body=body())
    assert answer.types[-1] == "RUN_FINISHED"


# ------------------------------------------------------------------ joining, reconnecting


async def test_a_reconnecting_post_gets_what_comes_after_its_event(
    chats: ChatRouter, agent: Agent
) -> None:
    """The same body with Last-Event-ID: strictly after, no new run."""
    first = await request(chats, "POST", json_body=body())
    headers = {"x-run-id": "r", "last-event-id": str(first.offsets[1])}
    again = await request(chats, "POST", json_body=body(), headers=headers)
    assert again.offsets == first.offsets[2:]
    assert len(agent.calls) == 1


async def test_a_reconnect_after_the_last_event_is_an_empty_stream(chats: ChatRouter) -> None:
    first = await request(chats, "POST", json_body=body())
    headers = {"x-run-id": "r", "last-event-id": str(first.offsets[-1])}
    again = await request(chats, "POST", json_body=body(), headers=headers)
    assert (again.status, again.body) == (200, b"")


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("offset", ["r:1", "", "garbage", "memory:v1:r:5"])
async def test_a_request_with_last_event_id_never_starts_a_run(
    chats: ChatRouter, agent: Agent, method: str, offset: str
) -> None:
    """An unknown run is 404, whatever the body says; an empty header is no new run either."""
    headers = {"x-run-id": "r", "last-event-id": offset}
    answer = await request(chats, method, json_body=body(), headers=headers)
    assert problem(answer) == (404, "unknown-run")
    assert agent.calls == []


@pytest.mark.parametrize("offset", ["garbage", "r:99", "q:1", "r:0"])
async def test_an_offset_that_is_none_of_the_run_is_404(chats: ChatRouter, offset: str) -> None:
    await request(chats, "POST", json_body=body())
    headers = {"x-run-id": "r", "last-event-id": offset}
    answer = await request(chats, "GET", headers=headers)
    assert problem(answer) == (404, "unknown-offset")


async def test_the_run_is_named_by_header_query_or_offset(chats: ChatRouter) -> None:
    """Each alone is enough."""
    first = await request(chats, "POST", json_body=body())
    offset = str(first.offsets[0])
    for headers, query in (
        ({"x-run-id": "r", "last-event-id": offset}, {}),
        ({"last-event-id": offset}, {"runId": "r"}),
        ({"last-event-id": offset}, {}),
        ({}, {"runId": "r", "offset": offset}),
        ({}, {"offset": offset}),
    ):
        answer = await request(chats, headers=headers, query=query)
        assert answer.offsets == first.offsets[1:]


async def test_the_header_wins_over_the_query(chats: ChatRouter) -> None:
    """A dropped join comes back with the same URL and the id of its last event."""
    first = await request(chats, "POST", json_body=body())
    answer = await request(
        chats,
        query={"offset": "-1", "runId": "r"},
        headers={"last-event-id": str(first.offsets[1])},
    )
    assert answer.offsets == first.offsets[2:]


async def test_an_empty_last_event_id_replays_from_the_start(chats: ChatRouter) -> None:
    first = await request(chats, "POST", json_body=body())
    headers = {"last-event-id": "", "x-run-id": "r"}
    assert (await request(chats, "POST", headers=headers)).body == first.body


async def test_a_finished_run_is_replayed_from_its_start(chats: ChatRouter) -> None:
    first = await request(chats, "POST", json_body=body())
    assert (await request(chats, query={"offset": "-1", "runId": "r"})).body == first.body


async def test_a_join_without_run_or_offset_is_400(chats: ChatRouter) -> None:
    for query in ({"offset": "-1"}, {"runId": "r"}, {"offset": "-1", "runId": "\x00"}):
        answer = await request(chats, query=query)
        assert answer.status == 400


async def test_a_trimmed_run_is_404_from_its_start(agent: Agent, persistence: Persistence) -> None:
    """What cannot be complete is not begun: the client keeps what it has."""
    from chatkeep.delivery import RunLog

    log = RunLog(max_run_bytes=150)
    async with chat_router(persistence, agent, allow_anonymous=True, log=log) as chats:
        await request(chats, "POST", json_body=body())
        answer = await request(chats, query={"offset": "-1", "runId": "r"})
    assert problem(answer) == (404, "events-trimmed")


async def test_other_methods_are_405(chats: ChatRouter) -> None:
    assert (await request(chats, "PUT")).status == 405


# --------------------------------------------------------------------------- who may what


def test_a_router_for_everybody_has_to_be_asked_for(agent: Agent, persistence: Persistence) -> None:
    with pytest.raises(CompositionError, match="allow_anonymous"):
        chat_router(persistence, agent)
    chat_router(persistence, agent, authorize=lambda *_: True)
    chat_router(persistence, agent, scope=Scope(user_id="u"))
    chat_router(persistence, agent, allow_anonymous=True)


def test_scopes_need_stores_that_know_them(agent: Agent, persistence: Persistence) -> None:
    """Said when the app is built, not to the first user."""

    async def load_activities(thread_id: str) -> list[Any]:
        return []

    async def save_activities(thread_id: str, activities: Any) -> None:
        return None

    own = define_activity_store(load_activities=load_activities, save_activities=save_activities)
    mixed = compose_persistence(persistence, overrides={"activities": own})
    with pytest.raises(CompositionError, match="activities"):
        chat_router(mixed, agent, scope=lambda _: Scope(user_id="u"))
    chat_router(mixed, agent, allow_anonymous=True)


async def test_authorize_is_asked_by_every_route(agent: Agent, persistence: Persistence) -> None:
    """Post, hydrate, join and reconnect ask for the thread; a no is 403 and nothing happens."""
    asked: list[str] = []
    answer_is = True

    def authorize(thread_id: str, request: Request) -> bool:
        asked.append(thread_id)
        return answer_is

    async with chat_router(persistence, agent, authorize=authorize) as chats:
        first = await request(chats, "POST", json_body=body())
        answer_is = False
        join = {"offset": "-1", "runId": "r"}
        reconnect = {"x-run-id": "r", "last-event-id": str(first.offsets[0])}
        refusals = [
            await request(chats, "POST", json_body=body("r2")),
            await request(chats, "POST", json_body=body()),
            await request(chats, query={"threadId": "t"}),
            await request(chats, query=join),
            await request(chats, headers=reconnect),
            await request(chats, "POST", json_body=body(), headers=reconnect),
        ]
    for refusal in refusals:
        assert (refusal.status, refusal.json) == (403, {"error": "Forbidden"})
        assert refusal.headers["cache-control"] == "no-store"
    assert asked == ["t"] * 7
    assert len(agent.calls) == 1


async def test_authorize_may_be_async_answer_itself_or_raise(
    agent: Agent, persistence: Persistence
) -> None:
    """A response is sent as it is; an HTTPException is the application's answer."""

    async def authorize(thread_id: str, request: Request) -> bool | Response:
        await asyncio.sleep(0)
        if thread_id == "teapot":
            return PlainTextResponse("short and stout", 418)
        if thread_id == "login":
            raise HTTPException(401)
        return thread_id == "mine"

    chats = chat_router(persistence, agent, authorize=authorize, path="/api/chat")
    app = Starlette(routes=chats.routes, lifespan=chats.lifespan)
    statuses = [
        (await request(app, "POST", "/api/chat", json_body=body(t, t))).status
        for t in ("teapot", "login", "yours", "mine")
    ]
    await chats.aclose()
    assert statuses == [418, 401, 403, 200]


async def test_runs_of_another_scope_do_not_exist(agent: Agent, persistence: Persistence) -> None:
    """The same run id of another user is another run; a join of theirs is 404."""

    async def scope(request: Request) -> Scope:
        return Scope(user_id=request.headers["x-user"])

    ada, bob = {"x-user": "ada"}, {"x-user": "bob"}
    async with chat_router(persistence, agent, scope=scope) as chats:
        await request(chats, "POST", json_body=body(), headers=ada)
        join = {"offset": "-1", "runId": "r"}
        assert problem(await request(chats, query=join, headers=bob)) == (404, "unknown-run")
        assert (await request(chats, query=join, headers=ada)).status == 200
        assert (await request(chats, "POST", json_body=body(), headers=bob)).status == 200
    assert len(agent.calls) == 2
    scopes = [params.persistence.backends[0].scope for params in agent.calls]
    assert scopes == [Scope(user_id="ada"), Scope(user_id="bob")]


async def test_an_agent_that_stores_in_another_scope_is_refused(persistence: Persistence) -> None:
    """Else one tenant's model would read the thread of another that has the same id."""
    unscoped = with_persistence(persistence)

    def careless(params: ChatParams) -> ChatStream:
        return chat(adapter=ScriptedModel(), middleware=[unscoped], **params.chat_kwargs())

    async def careful(params: ChatParams) -> ChatStream:
        keep = with_persistence(params.persistence)
        return chat(adapter=ScriptedModel(), middleware=[keep], **params.chat_kwargs())

    ada = Scope(user_id="ada")
    async with chat_router(persistence, careless, scope=ada) as chats:
        refused = await request(chats, "POST", json_body=body())
    assert problem(refused) == (500, "composition-error")
    assert await persistence.stores.messages.load_thread("t") == []
    assert await persistence.stores.runs.get("r") is None

    async with chat_router(persistence, careful, scope=ada) as chats:
        assert (await request(chats, "POST", json_body=body())).types[-1] == "RUN_FINISHED"
    assert await persistence.stores.messages.load_thread("t") == []
    assert len(await persistence.scoped(ada).stores.messages.load_thread("t")) == 2


# ------------------------------------------------------------------------------- mounting


async def test_routes_fit_into_an_app_and_its_lifespan_closes_them(
    agent: Agent, persistence: Persistence
) -> None:
    """Routes at a path, mounted below a prefix, or the router as an app of its own."""
    at_path = chat_router(persistence, agent, allow_anonymous=True, path="/api/chat")
    below = chat_router(persistence, agent, allow_anonymous=True, path="/chat")
    alone = chat_router(persistence, agent, allow_anonymous=True)
    apps = [
        (Starlette(routes=at_path.routes, lifespan=at_path.lifespan), "/api/chat"),
        (Starlette(routes=[Mount("/api", below)]), "/api/chat"),
        (Starlette(routes=[Mount("/api/chat", alone)]), "/api/chat/"),
        (alone, "/"),
    ]
    for i, (app, path) in enumerate(apps):
        answer = await request(app, "POST", path, json_body=body(f"r{i}"))
        assert answer.types[-1] == "RUN_FINISHED"
    async with at_path.lifespan(apps[0][0]):
        pass
    refused = await request(apps[0][0], "POST", "/api/chat", json_body=body("late"))
    assert refused.status == 503
    async with at_path.lifespan(apps[0][0]):
        again = await request(apps[0][0], "POST", "/api/chat", json_body=body("again"))
    assert again.types[-1] == "RUN_FINISHED"


async def test_shutdown_tells_running_runs_to_stop(persistence: Persistence) -> None:
    """Every run gets its signal, ends by itself and is over before aclose returns."""
    streams: list[Watched] = []

    def agent(params: ChatParams) -> AsyncIterator[BaseEvent]:
        streams.append(Watched("a", gate=params.abort, run_id=params.run_id))
        return streams[-1]

    async with chat_router(persistence, agent, allow_anonymous=True, drain=0.05) as chats:
        answer, task = open_request(chats, "POST", json_body=body())
        await answer.until(lambda a: b'"a"' in a.body)
    assert streams[0].end == "finished"
    await task
    assert answer.types[-1] == "RUN_FINISHED"


async def test_a_page_of_another_origin_may_do_what_clients_do(
    agent: Agent, persistence: Persistence
) -> None:
    """Post, join, reconnect and cancel pass their preflights; another origin does not."""
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        app = CORSMiddleware(chats, allow_origins=["https://page.example"], **CORS_OPTIONS)
        for method in ("POST", "GET", "DELETE"):
            asked = {
                "origin": "https://page.example",
                "access-control-request-method": method,
                "access-control-request-headers": "content-type,last-event-id,x-run-id",
            }
            answer = await request(app, "OPTIONS", headers=asked)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
        answer = await request(app, "OPTIONS", headers={**asked, "origin": "https://evil.example"})
        assert answer.status == 400
        posted = await request(
            app, "POST", json_body=body(), headers={"origin": "https://page.example"}
        )
        assert posted.headers["access-control-allow-origin"] == "https://page.example"
        assert posted.types[-1] == "RUN_FINISHED"
