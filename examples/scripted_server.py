"""A chat server with a scripted offline model, on any store that chatkeep can open.

    python examples/scripted_server.py --port 8000 --store sqlite:///chat.db

Serves ``/api/chat``. The last user message says what the model does: ``SCENARIO:approval``,
``SCENARIO:slow {"chunks": 50, "delayMs": 100}``; any other text is answered with a greeting.
With a header ``X-User`` the request works on that user's own rows. ``--calls`` writes down every
tool that really runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from chatkeep import Persistence, Scope, compose_persistence, open_persistence
from chatkeep.delivery import StoredLog
from chatkeep.engine import ChatContext, ChatMiddleware, ChatStream, ToolCallInfo, chat
from chatkeep.persistence import with_persistence
from chatkeep.testkit.scripted import (
    ScriptedModel,
    ScriptedPauses,
    scripted_interrupts,
    scripted_mode,
    scripted_schema,
    scripted_tools,
)
from chatkeep.web import ChatParams, ChatRouter, chat_router


def user_of(request: Request) -> Scope:
    """Stands for a session: an application takes the user from its login, not from a header."""
    return Scope(user_id=request.headers.get("x-user"))


class CallLog(ChatMiddleware):
    """Writes down the server tools that run, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def on_before_tool_call(self, ctx: ChatContext, call: ToolCallInfo) -> None:
        line = {
            "thread": ctx.thread_id,
            "run": ctx.run_id,
            "tool": call.tool_name,
            "args": call.args,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def make_router(persistence: Persistence, options: argparse.Namespace) -> ChatRouter:
    tools, questions = scripted_tools(), scripted_interrupts()
    watching = [CallLog(options.calls)] if options.calls else []

    def agent(params: ChatParams) -> ChatStream:
        keep = with_persistence(
            params.persistence,
            snapshot_streaming=options.drafts,
            snapshot_interval_ms=options.draft_ms,
            lease_ms=options.lease_ms,
        )
        return chat(
            adapter=ScriptedModel(structured_output=scripted_mode(params.messages)),
            tools=tools,
            interrupts=questions,
            output_schema=scripted_schema(params.messages),
            middleware=[keep, ScriptedPauses(), *watching],
            **params.chat_kwargs(),
        )

    return chat_router(
        persistence,
        agent,
        scope=user_of,
        allow_anonymous=True,
        path="/api/chat",
        log=StoredLog(persistence, lease_ms=options.lease_ms) if options.stored_log else None,
        drain=options.drain,
        heartbeat=options.heartbeat,
        sweep_seconds=min(10.0, options.lease_ms / 2_000),
    )


def make_app(persistence: Persistence, chats: ChatRouter) -> Starlette:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with persistence:
            await persistence.migrate()
            async with chats:  # from now on it sweeps too
                yield

    return Starlette(routes=chats.routes, lifespan=lifespan)


class Server(uvicorn.Server):
    """Says when it is ready, and ends its runs before it waits for open responses."""

    def __init__(self, config: uvicorn.Config, chats: ChatRouter, url: str) -> None:
        super().__init__(config)
        self.chats = chats
        self.url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"ready {self.url}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.chats.aclose()
        await super().shutdown(sockets)


def stay(_signum: int, _frame: object) -> None:
    """A signal that has been dealt with."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat server with a scripted model.")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--store", default="memory://", help="URL of the persistence")
    parser.add_argument("--lease-ms", type=int, default=30_000, help="life of a silent run")
    parser.add_argument("--stored-log", action="store_true", help="events in the database too")
    parser.add_argument("--drafts", action="store_true", help="store answers while they stream")
    parser.add_argument("--draft-ms", type=int, default=1_000, help="time between two drafts")
    parser.add_argument("--interrupts", help="URL of another place for the interrupts")
    parser.add_argument("--without", nargs="*", default=[], help="stores to leave out")
    parser.add_argument("--calls", type=Path, help="file that takes down the tools that run")
    parser.add_argument("--drain", type=float, default=2.0, help="seconds for runs at shutdown")
    parser.add_argument("--heartbeat", type=float, default=15.0, help="seconds of silence")
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args()
    logging.basicConfig(level=options.log_level.upper())

    persistence = open_persistence(options.store)
    overrides: dict[str, object] = dict.fromkeys(options.without, False)
    if options.interrupts:
        elsewhere = open_persistence(options.interrupts)  # closed with what it is composed into
        overrides["interrupts"] = elsewhere.stores.interrupts
    if overrides:
        persistence = compose_persistence(persistence, overrides=overrides)
    chats = make_router(persistence, options)
    app = make_app(persistence, chats)
    config = uvicorn.Config(app, log_level=options.log_level, timeout_graceful_shutdown=5)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((options.host, options.port))
    url = f"http://{options.host}:{listener.getsockname()[1]}/api/chat"
    # The server raises the signal that stopped it once more, when it has shut down.
    signal.signal(signal.SIGTERM, stay)
    Server(config, chats, url).run(sockets=[listener])


if __name__ == "__main__":
    main()
