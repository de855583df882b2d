"""A chat in FastAPI: routes of your own, users, a run that survives its tab, and approvals.

``uvicorn fastapi_app:app`` in this folder runs it. Who is logged in stands in a header here; an
application takes it from its session.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request, Response

from chatkeep import ChatkeepError, Scope, sqlite_persistence, with_persistence
from chatkeep.delivery import Delivery
from chatkeep.engine import chat
from chatkeep.testkit.scripted import ScriptedModel, scripted_tools
from chatkeep.web import (
    cancel_response,
    chat_router,
    parse_chat_request,
    problem_of,
    reconstruct_chat,
    sse_response,
    watch_response,
)

persistence = sqlite_persistence("chat.db")
delivery = Delivery()


def user_of(request: Request) -> Scope:
    user = request.headers.get("x-user")
    if not user:
        raise HTTPException(401, "log in first")
    return Scope(user_id=user)


# All routes at once ...
agent = {"adapter": ScriptedModel(), "tools": scripted_tools()}
chats = chat_router(persistence, agent, scope=user_of, path="/chat")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    async with persistence, chats, delivery:
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/api", chats)  # serves /api/chat


# ... or one by one, where a route needs more than the router does.
@app.post("/own/chat")
async def run(request: Request) -> Response:
    user = user_of(request)
    watched = await watch_response(request, delivery, scope=user)
    if watched is not None:
        return watched  # a reconnect: it starts nothing
    params = parse_chat_request(await request.body(), request.headers)
    stream = chat(
        adapter=ScriptedModel(),
        tools=scripted_tools(),
        middleware=[with_persistence(persistence.scoped(user))],
        **params.chat_kwargs(),
    )
    return sse_response(stream, delivery=delivery, scope=user)


@app.get("/own/chat")
async def load(request: Request) -> Response:
    user = user_of(request)
    watched = await watch_response(request, delivery, scope=user)
    if watched is not None:
        return watched  # a join
    return await reconstruct_chat(persistence.scoped(user), request)


@app.delete("/own/chat")
async def give_up(request: Request) -> Response:
    user = user_of(request)
    return await cancel_response(request, persistence.scoped(user), delivery, scope=user)


@app.exception_handler(ChatkeepError)
async def refuse(_: Request, error: ChatkeepError) -> Response:
    return problem_of(error)
