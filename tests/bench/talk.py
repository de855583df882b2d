"""Whole chats: engine, middleware and store together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from ag_ui.core import (
    BaseEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from bench.contenders import Chatkeep
from bench.data import answer, history, question
from bench.measure import lower_quartile
from chatkeep.engine import ModelRequest, chat, model_finished, tool
from chatkeep.persistence import with_persistence
from chatkeep.records import ModelMessage

__all__ = ["chat_turns", "two_at_once"]

_USAGE = {"promptTokens": 1000, "completionTokens": 100, "totalTokens": 1100}


@tool
def search(query: str, limit: int) -> dict[str, str]:
    """Search for a text."""
    return {"found": f"{limit} of {query}"}


class Model:
    """Calls one tool, then says its text; each about 1 KB, in chunks of 100 characters."""

    provider = "bench"
    model = "bench"

    async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
        call, _, text = answer()
        message_id = request.message_id
        if request.messages[-1].get("role") == "user":
            wanted = call.get("toolCalls", [])[0]
            yield TextMessageStartEvent(message_id=message_id)
            yield TextMessageEndEvent(message_id=message_id)
            yield ToolCallStartEvent(
                tool_call_id=wanted["id"], tool_call_name="search", parent_message_id=message_id
            )
            arguments = wanted["function"]["arguments"]
            for at in range(0, len(arguments), 100):
                yield ToolCallArgsEvent(tool_call_id=wanted["id"], delta=arguments[at : at + 100])
            yield ToolCallEndEvent(tool_call_id=wanted["id"])
            yield model_finished(request, "tool_calls", usage=_USAGE)
            return
        content = str(text.get("content"))
        yield TextMessageStartEvent(message_id=message_id)
        for at in range(0, len(content), 100):
            yield TextMessageContentEvent(message_id=message_id, delta=content[at : at + 100])
            await asyncio.sleep(0)
        yield TextMessageEndEvent(message_id=message_id)
        yield model_finished(request, "stop", usage=_USAGE)


async def _turn(contender: Chatkeep | None, thread: str, run: str, asked: ModelMessage) -> str:
    keep = [] if contender is None else [with_persistence(contender.backend.persistence())]
    stream = chat(
        adapter=Model(),
        tools=[search],
        messages=[asked],
        thread_id=thread,
        run_id=run,
        middleware=keep,
    )
    last = ""
    async for event in stream:
        last = str(event.type.value)
    return last


async def chat_turns(
    contender: Chatkeep | None, sizes: Sequence[int], rounds: int
) -> dict[int, float]:
    """ms of a whole turn over ``chat()``, loading included; without a contender that of
    the engine alone."""
    found: dict[int, float] = {}
    for size in sizes:
        thread = f"chat-{size}" if contender is None else f"{contender.name}/chat-{size}"
        if contender is not None:
            await contender.seed(thread, history(size))
        timed: list[float] = []
        for number in range(rounds + 2):
            asked = question()
            begin = time.perf_counter()
            last = await _turn(contender, thread, f"{thread}-{number}", asked)
            timed.append((time.perf_counter() - begin) * 1e3)
            if last != "RUN_FINISHED":
                raise RuntimeError(f"a turn on {thread} ended with {last}")
        found[size] = lower_quartile(timed[2:])
    return found


async def two_at_once(contender: Chatkeep, rounds: int = 20) -> int:
    """In how many rounds two turns at once on one thread both stayed, whole and in order."""
    kept = 0
    for number in range(rounds):
        thread = f"{contender.name}/two-{number}"
        await contender.seed(thread, history(10))
        asked = [question(), question()]
        ends = await asyncio.gather(
            *(_turn(contender, thread, f"{thread}-{i}", asked[i]) for i in range(2))
        )
        stored = (await contender.messages.load_thread(thread))[10:]
        ids = [message.get("id") for message in stored]
        turns = [[m.get("role") for m in stored[at : at + 4]] for at in (0, 4)]
        whole = turns == [["user", "assistant", "tool", "assistant"]] * 2
        both = {ids[0], ids[4]} == {asked[0].get("id"), asked[1].get("id")} if whole else False
        kept += bool(both and list(ends) == ["RUN_FINISHED"] * 2 and len(stored) == 8)
    return kept
