"""Cancelling a run by a request of its own."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from chatkeep import memory_persistence, with_persistence
from chatkeep.backends import Persistence
from chatkeep.engine import ChatStream, chat
from chatkeep.scope import Scope
from chatkeep.testkit.scripted import ScriptedModel, scripted_tools
from chatkeep.web import ChatParams, ChatRouter, chat_router

from .conftest import Answer, Watched, open_request, request

pytestmark = pytest.mark.anyio


def agent(params: ChatParams) -> ChatStream:
    keep = with_persistence(params.persistence)
    return chat(
        adapter=ScriptedModel(),
        tools=scripted_tools(),
        middleware=[keep],
        **params.chat_kwargs(),
    )


@pytest.fixture
def persistence() -> Persistence:
    return memory_persistence()


def body(text: str, run_id: str = "r", **fields: Any) -> dict[str, Any]:
    row = {"id": f"u-{run_id}", "role": "user", "content": text}
    return {"threadId": "t", "runId": run_id, "messages": [row], **fields}


async def cancel(chats: ChatRouter, **query: str) -> Answer:
    return await request(chats, "DELETE", query=query)


async def test_a_streaming_run_has_stopped_when_the_answer_comes(persistence: Persistence) -> None:
    """Its viewer sees it end as cancelled, and it is stored as aborted."""
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        slow = body('SCENARIO:slow {"chunks": 500, "delayMs": 10}')
        viewer, task = open_request(chats, "POST", json_body=slow)
        await viewer.until(lambda a: b"w1 " in a.body)
        answer = await cancel(chats, runId="r")
        assert (answer.status, answer.json) == (200, {"runId": "r", "outcome": "requested"})
        run = await persistence.stores.runs.get("r")  # type: ignore[union-attr]
        assert run is not None
        assert run.status == "aborted"
        await task
        assert viewer.events[-1]["outcome"] == {"type": "cancelled"}
        again = await cancel(chats, runId="r")
        assert (again.status, again.json["outcome"]) == (200, "ended")


async def test_a_paused_run_ends_with_its_questions(persistence: Persistence) -> None:
    """The thread takes new input, and the old answer comes too late."""
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        paused = await request(chats, "POST", json_body=body("SCENARIO:approval"))
        (descriptor,) = paused.events[-1]["outcome"]["interrupts"]
        answer = await cancel(chats, runId="r", threadId="t")
        assert (answer.status, answer.json["outcome"]) == (200, "cancelled")
        assert answer.headers["cache-control"] == "no-store"
        shown = (await request(chats, query={"threadId": "t"})).json
        assert (shown["interrupts"], shown["activeRun"]) == (None, None)
        yes = {"interruptId": descriptor["id"], "status": "resolved", "payload": True}
        late = await request(chats, "POST", json_body=body("x", "r2", messages=[], resume=[yes]))
        assert late.types == ["RUN_STARTED", "RUN_ERROR"]
        more = await request(chats, "POST", json_body=body("SCENARIO:text", "r3"))
        assert more.types[-1] == "RUN_FINISHED"


async def test_a_run_that_was_continued_is_not_the_one_to_cancel(persistence: Persistence) -> None:
    """Its answer is being carried out: nothing changes, and the continuation can be cancelled."""
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        slow = body('SCENARIO:approval-slow {"chunks": 500, "delayMs": 10}')
        paused = await request(chats, "POST", json_body=slow)
        (descriptor,) = paused.events[-1]["outcome"]["interrupts"]
        yes = {"interruptId": descriptor["id"], "status": "resolved", "payload": True}
        resumed = body("x", "r2", messages=[], resume=[yes])
        viewer, task = open_request(chats, "POST", json_body=resumed)
        await viewer.until(lambda a: b"w1 " in a.body)
        assert (await cancel(chats, runId="r")).json["outcome"] == "continued"
        assert (await cancel(chats, runId="r2")).json["outcome"] == "requested"
        await task
        assert viewer.events[-1]["outcome"] == {"type": "cancelled"}
        shown = (await request(chats, query={"threadId": "t"})).json
        assert [d["id"] for d in shown["interrupts"]["pending"]] == [descriptor["id"]]


async def test_a_run_that_nobody_stores_is_stopped_all_the_same(persistence: Persistence) -> None:
    """It is known to the process that drives it."""

    def unstored(params: ChatParams) -> Any:
        return Watched("one", gate=params.abort)

    async with chat_router(persistence, unstored, allow_anonymous=True) as chats:
        viewer, task = open_request(chats, "POST", json_body=body("hi"))
        await viewer.until(lambda a: b"one" in a.body)
        assert (await cancel(chats, runId="r")).json["outcome"] == "requested"
        await task
        assert viewer.types[-1] == "RUN_FINISHED"
        assert (await cancel(chats, runId="r")).json["outcome"] == "ended"


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ({}, 400, "bad-request"),
        ({"runId": ""}, 400, "bad-request"),
        ({"runId": "a\x00b"}, 400, "invalid-value"),
        ({"runId": "gone"}, 404, "unknown-run"),
        ({"runId": "r", "threadId": "another"}, 404, "unknown-run"),
    ],
)
async def test_what_names_no_run_of_the_thread_cancels_nothing(
    persistence: Persistence, query: dict[str, str], status: int, code: str
) -> None:
    async with chat_router(persistence, agent, allow_anonymous=True) as chats:
        await request(chats, "POST", json_body=body("SCENARIO:approval"))
        answer = await cancel(chats, **query)
        assert (answer.status, answer.json["code"]) == (status, code)
        assert (await request(chats, query={"threadId": "t"})).json["interrupts"] is not None


async def test_the_thread_of_the_run_decides_who_may(persistence: Persistence) -> None:
    """``authorize`` is asked for it before anything is changed."""
    asked: list[str] = []

    def owns(thread_id: str, request: Request) -> bool:
        asked.append(thread_id)
        return request.headers.get("x-user") == "ada"

    async with chat_router(persistence, agent, authorize=owns) as chats:
        ada = {"x-user": "ada"}
        await request(chats, "POST", json_body=body("SCENARIO:approval"), headers=ada)
        asked.clear()
        refused = await request(chats, "DELETE", query={"runId": "r"})
        assert refused.status == 403
        assert asked == ["t"]
        shown = await request(chats, query={"threadId": "t"}, headers=ada)
        assert shown.json["interrupts"] is not None
        allowed = await request(chats, "DELETE", query={"runId": "r"}, headers=ada)
        assert allowed.json["outcome"] == "cancelled"


async def test_runs_of_another_scope_do_not_exist(persistence: Persistence) -> None:
    def scope(request: Request) -> Scope | None:
        return Scope(user_id=request.headers.get("x-user"))

    async with chat_router(persistence, agent, scope=scope) as chats:
        ada, bob = {"x-user": "ada"}, {"x-user": "bob"}
        await request(chats, "POST", json_body=body("SCENARIO:approval"), headers=ada)
        assert (await request(chats, "DELETE", query={"runId": "r"}, headers=bob)).status == 404
        assert (await request(chats, "DELETE", query={"runId": "r"})).status == 403
        mine = await request(chats, "DELETE", query={"runId": "r"}, headers=ada)
        assert mine.json["outcome"] == "cancelled"
