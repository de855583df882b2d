"""Responses over the real engine and a store: what leaving, stopping and failing commit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from chatkeep import memory_persistence, with_persistence
from chatkeep.backends import Persistence
from chatkeep.delivery import Delivery, RunKey
from chatkeep.engine import ChatMiddleware, ChatStream, chat, tool
from chatkeep.errors import CompositionError
from chatkeep.persistence import hydrate_thread
from chatkeep.records import RunRecord
from chatkeep.scope import Scope
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.scripted import ScriptedModel, scripted_tools
from chatkeep.web import ChatParams, chat_router, sse_response

from .conftest import open_request, request

pytestmark = pytest.mark.anyio
SLOW = 'SCENARIO:slow {"chunks": 100, "delayMs": 20}'


@pytest.fixture
def persistence() -> Persistence:
    return memory_persistence()


def make(persistence: Persistence, text: str, **options: Any) -> ChatStream:
    return chat(
        adapter=ScriptedModel(),
        tools=scripted_tools(),
        messages=[{"id": "u", "role": "user", "content": text}],
        thread_id="t",
        run_id="r",
        middleware=[with_persistence(persistence, **options)],
    )


async def run_of(persistence: Persistence, run_id: str = "r") -> RunRecord:
    assert persistence.stores.runs is not None
    run = await persistence.stores.runs.get(run_id)
    assert run is not None
    return run


def body(text: str, run_id: str = "r") -> dict[str, Any]:
    message = {"id": f"u-{run_id}", "role": "user", "content": text}
    return {"threadId": "t", "runId": run_id, "messages": [message]}


async def test_without_a_log_leaving_stores_the_run_as_aborted(persistence: Persistence) -> None:
    """When the request is over, the abort is in the store, with the part that was there."""
    stream = make(persistence, SLOW, snapshot_streaming=True, snapshot_interval_ms=0)
    answer, task = open_request(sse_response(stream))
    await answer.until(lambda a: b"w3 " in a.body)
    answer.leave.set()
    await task
    assert (await run_of(persistence)).status == "aborted"
    page = await hydrate_thread(persistence, "t")
    assert page["activeRun"] is None
    assert page["messages"][-1]["parts"][0]["content"].startswith("w0 w1 w2 w3 ")


async def test_with_a_log_leaving_stores_the_whole_run(persistence: Persistence) -> None:
    text = 'SCENARIO:slow {"chunks": 10, "delayMs": 5}'
    async with Delivery() as delivery:
        stream = make(persistence, text)
        answer, task = open_request(sse_response(stream, delivery=delivery))
        await answer.until(lambda a: b"w1 " in a.body)
        answer.leave.set()
        await task
        async for _ in await delivery.follow(RunKey(run_id="r")):
            pass
    assert (await run_of(persistence)).status == "completed"


async def test_a_stopped_run_tells_its_viewers_and_its_store(persistence: Persistence) -> None:
    """An abort closes what is open, ends with outcome cancelled, and is stored."""

    def agent(params: ChatParams) -> ChatStream:
        keep = with_persistence(params.persistence)
        return chat(adapter=ScriptedModel(), middleware=[keep], **params.chat_kwargs())

    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        answer, task = open_request(chats, "POST", json_body=body(SLOW))
        await answer.until(lambda a: b"w3 " in a.body)
        assert await chats.delivery.abort(RunKey(run_id="r"), "enough")
        await task
    check_events(answer.events)
    assert answer.events[-1]["outcome"] == {"type": "cancelled"}
    assert (await run_of(persistence)).status == "aborted"


async def test_a_tool_result_that_is_no_json_fails_the_call_not_the_run(
    persistence: Persistence,
) -> None:
    @tool
    def get_weather(city: str) -> Any:
        """Weather."""
        return object()

    agent = {"adapter": ScriptedModel(), "tools": [get_weather]}
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        answer = await request(chats, "POST", json_body=body("SCENARIO:server-tool"))
    check_events(answer.events)
    assert answer.types[-1] == "RUN_FINISHED"
    (result,) = [e for e in answer.events if e["type"] == "TOOL_CALL_RESULT"]
    assert result["metadata"]["tanstack"]["state"] == "output-error"


async def test_options_of_a_chat_are_an_agent(persistence: Persistence) -> None:
    """The router adds what keeps the chat, in the scope of the request."""
    agent = {"adapter": ScriptedModel(), "tools": scripted_tools()}
    scope = Scope(user_id="ada")
    async with chat_router(persistence, agent, scope=lambda _: scope) as chats:
        answer = await request(chats, "POST", json_body=body("hello"))
    assert answer.types[-1] == "RUN_FINISHED"
    assert (await run_of(persistence.scoped(scope))).status == "completed"
    assert persistence.stores.runs is not None
    assert await persistence.stores.runs.get("r") is None


async def test_options_that_keep_the_chat_themselves_are_left_alone(
    persistence: Persistence,
) -> None:
    """Not stored twice; and refused beside a scope, which they would not follow."""
    order: list[str] = []

    class Note(ChatMiddleware):
        async def on_start(self, ctx: Any) -> None:
            order.append("note")

    own = [Note(), with_persistence(persistence)]
    agent = {"adapter": ScriptedModel(), "middleware": own}
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        answer = await request(chats, "POST", json_body=body("hello"))
    assert answer.types[-1] == "RUN_FINISHED"
    assert order == ["note"]
    with pytest.raises(CompositionError, match="scope="):
        chat_router(persistence, agent, scope=lambda _: Scope(user_id="ada"))


async def test_a_commit_that_fails_at_the_end_is_a_run_error(
    persistence: Persistence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published has been stored: the stream does not say finished when it is not."""
    from chatkeep.errors import CorruptRecord
    from chatkeep.stores import TurnCommit

    backend = type(persistence.backends[0])
    commit = backend.commit_turn

    async def fail(self: Any, turn: TurnCommit) -> Any:
        if getattr(turn.run, "status", None) == "completed":
            raise CorruptRecord("the head", "broken")
        return await commit(self, turn)

    monkeypatch.setattr(backend, "commit_turn", fail)
    agent = {"adapter": ScriptedModel()}
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        answer = await request(chats, "POST", json_body=body("hello"))
    assert answer.types[-1] == "RUN_ERROR"
    assert "RUN_FINISHED" not in answer.types
    assert answer.events[-1]["code"] == "corrupt-record"


async def test_many_viewers_and_posts_leave_no_task_behind(persistence: Persistence) -> None:
    """Fifty runs, each watched, left and joined: afterwards only this test runs."""
    agent = {"adapter": ScriptedModel()}
    before = len(asyncio.all_tasks())
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        for i in range(50):
            answer, task = open_request(chats, "POST", json_body=body("hello", f"r{i}"))
            if i % 2:
                await answer.until(lambda a: bool(a.chunks))
                answer.leave.set()
            await task
            joined = await request(chats, query={"offset": "-1", "runId": f"r{i}"})
            assert joined.types[-1] == "RUN_FINISHED"
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) <= before


def test_without_starlette_the_import_names_the_extra() -> None:
    """``import chatkeep`` works; ``chatkeep.web`` says what to install."""
    code = (
        "import sys\n"
        "sys.modules['starlette'] = None\n"
        "import chatkeep\n"
        "from chatkeep.errors import MissingExtra\n"
        "try:\n"
        "    import chatkeep.web\n"
        "except MissingExtra as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "chatkeep[web]"' in done.stdout
