"""A model that runs offline and does what the last user message says.

``SCENARIO:<name>``, optionally a space and a JSON object of options, plays a scenario; any other
text plays ``text``. What a scenario says depends on the tool results that came after that
message, so one scenario spans the turns of a run, and runs after a reload go on alike.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import anyio
from ag_ui.core import (
    ReasoningEndEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
    RunErrorEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine.adapter import ModelRequest, model_finished
from chatkeep.engine.middleware import ChatContext, Event, FinishReason
from chatkeep.engine.tools import Tool, define_tool
from chatkeep.records import ModelMessage

__all__ = ["TOOL_SCHEMAS", "ScriptedFailure", "ScriptedModel", "scenarios", "scripted_tools"]

TOOL_SCHEMAS: Final[Mapping[str, Mapping[str, Any]]] = {
    "get_weather": {
        "description": "Weather for a city (server tool).",
        "input": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "failing_tool": {
        "description": "Server tool that always throws.",
        "input": {
            "type": "object",
            "properties": {"reason": {"type": "string"}},
            "required": ["reason"],
            "additionalProperties": False,
        },
    },
}
"""JSON Schemas of the scripted tools: a browser that registers the same tools hashes the same."""

_USAGE: Final = {"promptTokens": 10, "completionTokens": 5, "totalTokens": 15}
_LATER: Final = frozenset(
    {
        "activity", "approval", "approval-slow", "approval-two", "client-tool",
        "client-tool-adhoc", "client-tool-noschema", "client-tool-sequence", "generic", "mixed",
        "structured", "ui-resource", "ui-resource-parallel", "ui-resource-plain",
    }
)  # fmt: skip


class ScriptedFailure(Exception):
    """How the failing scenarios fail: as a provider's client library would, by raising."""


@dataclass(frozen=True, slots=True)
class _Scene:
    """What a scenario sees: the request, its options, and the results so far."""

    request: ModelRequest
    options: Mapping[str, Any]
    results: Sequence[str]

    def joined(self) -> str:
        return " | ".join(self.results)

    async def say(self, *deltas: str, pause: float = 0.0) -> AsyncIterator[Event]:
        identity = self.request.message_id
        yield TextMessageStartEvent(message_id=identity)
        for delta in deltas:
            if pause:
                await anyio.sleep(pause)
            yield TextMessageContentEvent(message_id=identity, delta=delta)
        yield TextMessageEndEvent(message_id=identity)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> AsyncIterator[Event]:
        identity = ChatContext.create_id("call")
        parent = self.request.message_id
        yield ToolCallStartEvent(
            tool_call_id=identity, tool_call_name=name, parent_message_id=parent
        )
        text = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
        yield ToolCallArgsEvent(tool_call_id=identity, delta=text)
        yield ToolCallEndEvent(tool_call_id=identity)

    def end(self, reason: FinishReason) -> Event:
        return model_finished(self.request, reason, usage=dict(_USAGE))


_Script = Callable[[_Scene], AsyncIterator[Event]]


async def _text(scene: _Scene) -> AsyncIterator[Event]:
    async for event in scene.say("Hello", " from the", " scripted model."):
        yield event
    yield scene.end("stop")


async def _slow(scene: _Scene) -> AsyncIterator[Event]:
    count = int(scene.options.get("chunks", 20))
    pause = float(scene.options.get("delayMs", 100)) / 1000
    async for event in scene.say(*(f"w{i} " for i in range(count)), pause=pause):
        yield event
    yield scene.end("stop")


async def _reasoning(scene: _Scene) -> AsyncIterator[Event]:
    identity = ChatContext.create_id("reason")
    yield ReasoningStartEvent(message_id=identity)
    yield ReasoningMessageStartEvent(message_id=identity, role="reasoning")
    for delta in ("Let me ", "think."):
        yield ReasoningMessageContentEvent(message_id=identity, delta=delta)
    yield ReasoningMessageEndEvent(message_id=identity)
    yield ReasoningEndEvent(message_id=identity)
    async for event in scene.say("Reasoned answer."):
        yield event
    yield scene.end("stop")


def _one_tool(name: str, arguments: Mapping[str, Any], answer: str, *, lead: str = "") -> _Script:
    """Call one tool, then say what came of it."""

    async def script(scene: _Scene) -> AsyncIterator[Event]:
        if scene.results:
            async for event in scene.say(f"{answer}{scene.joined()}"):
                yield event
            yield scene.end("stop")
            return
        if lead:
            async for event in scene.say(lead):
                yield event
        async for event in scene.call(name, arguments):
            yield event
        yield scene.end("tool_calls")

    return script


async def _error(scene: _Scene) -> AsyncIterator[Event]:
    identity = scene.request.message_id
    yield TextMessageStartEvent(message_id=identity)
    yield TextMessageContentEvent(message_id=identity, delta="partial ")
    raise ScriptedFailure("scripted failure")


async def _error_early(scene: _Scene) -> AsyncIterator[Event]:
    if not scene.results:
        raise ScriptedFailure("scripted failure")
    yield scene.end("stop")


async def _inspect(scene: _Scene) -> AsyncIterator[Event]:
    rows = [_described(message) for message in scene.request.messages]
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False)
    async for event in scene.say(text):
        yield event
    yield scene.end("stop")


def _described(message: ModelMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.get("role")}
    if message.get("id"):
        out["id"] = message.get("id")
    text = _text_of(message)
    if text:
        out["text"] = text
    calls = message.get("toolCalls")
    if calls:
        out["toolCalls"] = [call["id"] for call in calls]
    for key in ("toolCallId", "error"):
        if message.get(key) is not None:
            out[key] = message.get(key)
    return out


_SCRIPTS: Final[Mapping[str, _Script]] = {
    "text": _text,
    "slow": _slow,
    "reasoning": _reasoning,
    "server-tool": _one_tool("get_weather", {"city": "Paris"}, "Weather: "),
    "server-tool-text": _one_tool(
        "get_weather", {"city": "Paris"}, "Weather: ", lead="Looking up. "
    ),
    "server-tool-error": _one_tool("failing_tool", {"reason": "scripted"}, "Tool outcome: "),
    "error": _error,
    "error-early": _error_early,
    "inspect": _inspect,
}


def scenarios() -> tuple[str, ...]:
    """Names that :class:`ScriptedModel` plays, sorted."""
    return tuple(sorted(_SCRIPTS))


class ScriptedModel:
    """The model adapter. It keeps no state: one object serves any number of runs."""

    provider = "scripted"

    def __init__(self, model: str = "scripted-1") -> None:
        self.model = model

    async def stream(self, request: ModelRequest) -> AsyncIterator[Event]:
        """Play the scenario that the last user message names."""
        name, options, results = _direction(request.messages)
        script = _SCRIPTS.get(name)
        if script is None:
            known = ", ".join(scenarios())
            why = "comes with a later version" if name in _LATER else "is unknown"
            yield RunErrorEvent(
                message=f"scenario {name!r} {why}; there are: {known}", code="unknown-scenario"
            )
            return
        async for event in script(_Scene(request, options, results)):
            yield event


def _direction(
    messages: Sequence[ModelMessage],
) -> tuple[str, Mapping[str, Any], list[str]]:
    """Scenario, options, and the contents of the tool results after the last user message."""
    last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
    results = [_text_of(m) for m in messages[last + 1 :] if m.get("role") == "tool"]
    text = _text_of(messages[last]) if last >= 0 else ""
    if not text.startswith("SCENARIO:"):
        return "text", {}, results
    name, _, rest = text.removeprefix("SCENARIO:").partition(" ")
    options: Any = json.loads(rest) if rest.strip() else {}
    if not isinstance(options, dict):
        raise ScriptedFailure(f"options of scenario {name!r} must be a JSON object: {rest}")
    return name, cast("dict[str, Any]", options), results


def _text_of(message: ModelMessage) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if message.get("role") == "tool":
        return json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return "".join(str(p.get("content", "")) for p in content or () if p.get("type") == "text")


def _get_weather(args: dict[str, Any]) -> dict[str, Any]:
    return {"city": args["city"], "tempC": 21}


def _failing_tool(args: dict[str, Any]) -> None:
    raise ScriptedFailure(f"tool failed: {args['reason']}")


def scripted_tools() -> list[Tool]:
    """The server tools that the scenarios call."""
    run: dict[str, Callable[[dict[str, Any]], Any]] = {
        "get_weather": _get_weather,
        "failing_tool": _failing_tool,
    }
    return [
        define_tool(
            name=name,
            description=TOOL_SCHEMAS[name]["description"],
            input_schema=TOOL_SCHEMAS[name]["input"],
            execute=execute,
        )
        for name, execute in run.items()
    ]
