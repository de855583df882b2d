"""What the scripted model says: one function a scenario, told by what has come of it so far."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import anyio
from ag_ui.core import (
    ActivityDeltaEvent,
    ActivitySnapshotEvent,
    CustomEvent,
    ReasoningEndEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine.adapter import ModelRequest, model_finished
from chatkeep.engine.middleware import ChatContext, Event, FinishReason
from chatkeep.records import ModelMessage
from chatkeep.testkit._scripted_tools import WIDGET, ScriptedFailure

__all__ = ["ANSWERS", "SCENES", "Scene", "direction", "scenario_of"]

ANSWERS: Final = "scripted-answers"
"""Model option under which the pauses hand over what was answered."""

_USAGE: Final = {"promptTokens": 10, "completionTokens": 5, "totalTokens": 15}


@dataclass(frozen=True, slots=True)
class Scene:
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

    def slowly(self) -> AsyncIterator[Event]:
        count = int(self.options.get("chunks", 20))
        pause = float(self.options.get("delayMs", 100)) / 1000
        return self.say(*(f"w{i} " for i in range(count)), pause=pause)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> AsyncIterator[Event]:
        identity = ChatContext.create_id("call")
        parent = self.request.message_id
        yield ToolCallStartEvent(
            tool_call_id=identity, tool_call_name=name, parent_message_id=parent
        )
        yield ToolCallArgsEvent(tool_call_id=identity, delta=_compact(arguments))
        yield ToolCallEndEvent(tool_call_id=identity)
        if self.options.get("widgetFrom") == "model":
            value = {**WIDGET, "toolCallId": identity}
            yield CustomEvent(name="ui-resource", value=value)

    def end(self, reason: FinishReason) -> Event:
        return model_finished(self.request, reason, usage=dict(_USAGE))


_Script: TypeAlias = Callable[[Scene], AsyncIterator[Event]]
_Call: TypeAlias = tuple[str, Mapping[str, Any]]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


async def _text(scene: Scene) -> AsyncIterator[Event]:
    async for event in scene.say("Hello", " from the", " scripted model."):
        yield event
    yield scene.end("stop")


async def _slow(scene: Scene) -> AsyncIterator[Event]:
    async for event in scene.slowly():
        yield event
    yield scene.end("stop")


async def _reasoning(scene: Scene) -> AsyncIterator[Event]:
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


def _calls(*turns: Sequence[_Call], answer: str, lead: str = "", slowly: bool = False) -> _Script:
    """Call the tools of one turn after the other, then say what came of them.

    A turn is over when it has as many results as calls; ``lead`` is said before the first. The
    run that the option ``failsIn`` names fails when all results are there.
    """

    async def script(scene: Scene) -> AsyncIterator[Event]:
        done = 0
        for turn in turns:
            if len(scene.results) < done + len(turn):
                if lead:
                    async for event in scene.say(lead):
                        yield event
                for name, arguments in turn:
                    async for event in scene.call(name, _filled(arguments, scene.options)):
                        yield event
                yield scene.end("tool_calls")
                return
            done += len(turn)
        if scene.options.get("failsIn") == scene.request.run_id:
            raise ScriptedFailure("scripted failure")
        said = scene.slowly() if slowly else scene.say(f"{answer}{scene.joined()}")
        async for event in said:
            yield event
        yield scene.end("stop")

    return script


def _filled(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options.get(name, value) for name, value in arguments.items()}


async def _generic(scene: Scene) -> AsyncIterator[Event]:
    answers: list[Any] = list(scene.request.model_options.get(ANSWERS, ()))
    text = _compact(answers[0]) if len(answers) == 1 else _compact(answers)
    async for event in scene.say("Generic outcome: ", text):
        yield event
    yield scene.end("stop")


async def _structured(scene: Scene) -> AsyncIterator[Event]:
    """``{"as": "event"}``: prose, and the object beside it; ``{"raw": …}``: another answer;
    ``{"tool": true}``: after a call of a tool."""
    value = {"name": "Ada", "age": 36}
    raw = str(scene.options.get("raw", _compact(value)))
    if scene.options.get("tool") and not scene.results:
        async for event in scene.call("get_weather", {"city": "Paris"}):
            yield event
        yield scene.end("tool_calls")
        return
    if scene.options.get("as") == "event":
        async for event in scene.say("Here is the record."):
            yield event
        done = {"object": value, "raw": raw}
        yield CustomEvent(name="structured-output.complete", value=done)
    elif scene.options.get("as") == "separate" and scene.request.output_schema is None:
        async for event in scene.say("Let me write that down."):
            yield event
    else:
        half = len(raw) // 2
        async for event in scene.say(*(piece for piece in (raw[:half], raw[half:]) if piece)):
            yield event
    yield scene.end("stop")


async def _activity(scene: Scene) -> AsyncIterator[Event]:
    """``{"then": "error"}`` fails behind the row, ``{"then": "slow"}`` takes its time there."""
    identity = f"activity-{scene.request.run_id}"
    yield ActivitySnapshotEvent(
        message_id=identity, activity_type="search", content={"query": "fireflies", "found": 0}
    )
    patch: list[Any] = [
        {"op": "replace", "path": "/found", "value": 3},
        {"op": "add", "path": "/done", "value": True},
    ]
    yield ActivityDeltaEvent(message_id=identity, activity_type="search", patch=patch)
    then = scene.options.get("then")
    if then == "error":
        raise ScriptedFailure("scripted failure")
    async for event in scene.slowly() if then == "slow" else scene.say("Activity done."):
        yield event
    yield scene.end("stop")


async def _error(scene: Scene) -> AsyncIterator[Event]:
    identity = scene.request.message_id
    yield TextMessageStartEvent(message_id=identity)
    yield TextMessageContentEvent(message_id=identity, delta="partial ")
    raise ScriptedFailure("scripted failure")


async def _error_early(scene: Scene) -> AsyncIterator[Event]:
    if not scene.results:
        raise ScriptedFailure("scripted failure")
    yield scene.end("stop")


async def _inspect(scene: Scene) -> AsyncIterator[Event]:
    rows = [_described(message) for message in scene.request.messages]
    async for event in scene.say(_compact(rows)):
        yield event
    yield scene.end("stop")


def _described(message: ModelMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.get("role")}
    if message.get("id"):
        out["id"] = message.get("id")
    text = text_of(message)
    if text:
        out["text"] = text
    calls = message.get("toolCalls")
    if calls:
        out["toolCalls"] = [call["id"] for call in calls]
    for key in ("toolCallId", "error"):
        if message.get(key) is not None:
            out[key] = message.get(key)
    return out


_WEATHER: Final = ("get_weather", {"city": "Paris"})
_EMAIL: Final = ("send_email", {"to": "ada@example.com", "subject": "Hi"})
_LOCATION: Final = ("get_location", {"accuracy": "high"})
_COLOR: Final = ("pick_color", {"palette": "warm"})
_SHOW: Final = ("show_widget", {"kind": "fireflies"})
_AWAIT: Final[_Call] = ("await_widget_result", {})

SCENES: Final[Mapping[str, _Script]] = {
    "text": _text,
    "slow": _slow,
    "reasoning": _reasoning,
    "structured": _structured,
    "server-tool": _calls([_WEATHER], answer="Weather: "),
    "server-tool-text": _calls([_WEATHER], answer="Weather: ", lead="Looking up. "),
    "server-tool-error": _calls(
        [("failing_tool", {"reason": "scripted"})], answer="Tool outcome: "
    ),
    "long-job": _calls([("long_job", {"ms": 60_000})], answer="Job outcome: "),
    "approval": _calls([_EMAIL], answer="Email outcome: "),
    "approval-slow": _calls([_EMAIL], answer="", slowly=True),
    "approval-two": _calls(
        [
            ("send_email", {"to": "ada@example.com", "subject": "A"}),
            ("send_email", {"to": "bob@example.com", "subject": "B"}),
        ],
        answer="Email outcomes: ",
    ),
    "approval-form": _calls([("transfer", {"amount": 5})], answer="Transfer outcome: "),
    "approval-job": _calls([("approved_job", {"ms": 60_000})], answer="Job outcome: "),
    "approval-client": _calls([("share_photo", {"album": "all"})], answer="Photo outcome: "),
    "client-tool": _calls([_LOCATION], answer="Location outcome: "),
    "client-tool-noschema": _calls([_COLOR], answer="Color outcome: "),
    "client-tool-adhoc": _calls([("adhoc_client_tool", {"q": 1})], answer="Adhoc outcome: "),
    "client-tool-sequence": _calls([_LOCATION], [_COLOR], answer="Sequence outcome: "),
    "mixed": _calls([_EMAIL, _LOCATION], answer="Mixed outcome: "),
    "mixed-server": _calls([_WEATHER, _EMAIL, _LOCATION], answer="Mixed outcome: "),
    "generic": _generic,
    "ui-resource": _calls([_SHOW], [_AWAIT], answer="Widget outcome: "),
    "ui-resource-parallel": _calls([_SHOW, _AWAIT], answer="Widget outcome: "),
    "ui-resource-plain": _calls([_SHOW], answer="Widget outcome: "),
    "activity": _activity,
    "error": _error,
    "error-early": _error_early,
    "inspect": _inspect,
}
"""The scenarios by name."""


def scenario_of(messages: Sequence[ModelMessage]) -> tuple[str, str, int]:
    """Scenario and text of its options, and the place of the user message that names them."""
    last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
    text = text_of(messages[last]) if last >= 0 else ""
    if not text.startswith("SCENARIO:"):
        return "text", "", last
    name, _, rest = text.removeprefix("SCENARIO:").partition(" ")
    return name, rest, last


def direction(messages: Sequence[ModelMessage]) -> tuple[str, Mapping[str, Any], list[str]]:
    """Scenario, options, and the contents of the tool results after the last user message.

    Raises:
        ScriptedFailure: the options are no JSON object.
    """
    name, rest, last = scenario_of(messages)
    results = [
        text_of(m)
        for m in messages[last + 1 :]
        if m.get("role") == "tool" and not _is_placeholder(m)
    ]
    options: Any = json.loads(rest) if rest.strip() else {}
    if not isinstance(options, dict):
        raise ScriptedFailure(f"options of scenario {name!r} must be a JSON object: {rest}")
    return name, cast("dict[str, Any]", options), results


def _is_placeholder(message: ModelMessage) -> bool:
    """A row that a browser shows while an approved call waits for its execution."""
    text = text_of(message)
    if '"pendingExecution"' not in text:
        return False
    try:
        value: Any = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and cast("dict[str, Any]", value).get("pendingExecution") is True


def text_of(message: ModelMessage) -> str:
    """The text of a message, as the model reads it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if message.get("role") == "tool":
        return _compact(content)
    return "".join(str(p.get("content", "")) for p in content or () if p.get("type") == "text")
