"""The whole backend of a chat. ``uvicorn minimal_app:app`` in this folder runs it."""

from __future__ import annotations

from starlette.applications import Starlette

from chatkeep import sqlite_persistence
from chatkeep.testkit.scripted import ScriptedModel, scripted_tools
from chatkeep.web import chat_router

persistence = sqlite_persistence("chat.db")  # created on first use
agent = {"adapter": ScriptedModel(), "tools": scripted_tools()}  # your model goes here
chats = chat_router(persistence, agent, allow_anonymous=True, path="/api/chat")
app = Starlette(routes=chats.routes, lifespan=chats.lifespan)
