"""Two workers on one database: who may watch and stop a run that the other one drives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from chatkeep import memory_persistence
from chatkeep.backends import Persistence
from chatkeep.delivery import StoredLog
from chatkeep.scope import Scope
from chatkeep.testkit.scripted import ScriptedModel
from chatkeep.web import ChatRouter, chat_router

from .conftest import request

pytestmark = pytest.mark.anyio
BODY: dict[str, Any] = {
    "threadId": "anns",
    "runId": "r",
    "messages": [{"id": "u1", "role": "user", "content": "hi"}],
}
JOIN = {"offset": "-1", "runId": "r"}


def _worker(persistence: Persistence) -> ChatRouter:
    def tenant(request: Request) -> Scope:
        return Scope(tenant_id=request.headers["x-tenant"])

    def owns(thread_id: str, request: Request) -> bool:
        return thread_id == request.headers["x-thread"]

    log = StoredLog(persistence, poll_seconds=0.01)
    options: dict[str, Any] = {"adapter": ScriptedModel()}
    return chat_router(persistence, options, scope=tenant, authorize=owns, log=log)


def _who(tenant: str, thread: str, **more: str) -> dict[str, str]:
    return {"x-tenant": tenant, "x-thread": thread, **more}


async def test_a_run_id_proves_nothing_on_any_worker() -> None:
    """Another's run is refused, another tenant's is not there; only its owner sees it."""
    persistence = memory_persistence()
    async with persistence, _worker(persistence) as one, _worker(persistence) as two:
        ann = _who("acme", "anns")
        first = await request(one, "POST", headers=ann, json_body=BODY)
        assert first.types[-1] == "RUN_FINISHED"
        seen = first.offsets[0]
        assert seen is not None
        for who, status in ((_who("acme", "bobs"), 403), (_who("other", "anns"), 404)):
            back = who | {"last-event-id": seen}
            for method, query, headers in (
                ("GET", JOIN, who),
                ("GET", JOIN | {"threadId": who["x-thread"]}, who),
                ("GET", {}, back),
                ("POST", {}, back),
                ("DELETE", {"runId": "r"}, who),
            ):
                answer = await request(two, method, query=query, headers=headers, json_body=BODY)
                assert answer.status == status, (method, query)
                assert seen.encode() not in answer.body
        async with asyncio.timeout(10):
            joined = await request(two, query=JOIN, headers=ann)
            rest = await request(two, headers=ann | {"last-event-id": seen})
            again = await request(two, "POST", "/", headers=ann, json_body=BODY)
        assert joined.body == again.body == first.body
        assert rest.offsets == first.offsets[1:]
        theirs = BODY | {"threadId": "bobs"}
        answer = await request(two, "POST", "/", headers=_who("acme", "bobs"), json_body=theirs)
        assert answer.status == 409
