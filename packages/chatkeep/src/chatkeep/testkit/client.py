"""A browser client without a browser: events become UI messages, UI messages become posts.

:class:`ChatView` applies a stream the way the browser client does, so that what a user saw
live can be compared with what a reload brings back. Nothing in here uses the package's own
message conversions: a mistake in those must not cancel itself out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jsonpatch

from chatkeep.testkit._client_rows import (
    Message,
    Part,
    bag_of,
    error_text,
    from_rows,
    parsed,
    settle,
    wire_rows,
)

__all__ = ["ChatView", "SseReader", "StreamError", "comparable", "wire_rows"]


class StreamError(ValueError):
    """Bytes that a browser client would not read as a stream of events."""


class SseReader:
    """Splits a body into events, line by line, as strictly as the browser client does.

    Feed it bytes as they come; :meth:`close` says whether the body may end here.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._offset: str | None = None
        self.comments = 0

    def feed(self, chunk: bytes) -> list[tuple[str | None, dict[str, Any]]]:
        """The events that are complete now, each with its offset (None if it has none).

        Raises:
            StreamError: a line that the client does not know, or data that is no JSON object.
        """
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events: list[tuple[str | None, dict[str, Any]]] = []
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8")
            if line.startswith(":"):
                self.comments += 1
            elif line.startswith("id:"):
                self._offset = line[3:].strip()
            elif line.startswith("data:"):
                events.append((self._offset, _event(line[5:])))
                self._offset = None
            elif line and not line.startswith(("event:", "retry:")):
                raise StreamError(f"a line that is no SSE field of ours: {line!r}")
        return events

    def close(self) -> None:
        """Raise ``StreamError`` if the body ended in the middle of a line."""
        if self._rest:
            raise StreamError(f"unterminated trailing data: {self._rest[:80]!r}")


def _event(text: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise StreamError(f"a data line that is no JSON: {error}") from error
    if not isinstance(value, dict) or "type" not in value:
        raise StreamError("a data line that is no event")
    return cast("dict[str, Any]", value)


class ChatView:
    """What a chat page shows: messages with parts, a status, and what waits for the user.

    ``status`` is ``ready``, ``streaming`` or ``error``; ``error`` is the RUN_ERROR event;
    ``interrupts`` the descriptors that wait for an answer and ``paused_run`` the run that asked;
    ``custom`` the CUSTOM events that are the application's. Activities are rows of their own,
    as newer clients show them.
    """

    def __init__(
        self,
        messages: Iterable[Mapping[str, Any]] = (),
        *,
        interrupts: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages: list[Message] = [json.loads(json.dumps(m)) for m in messages]
        self.status = "ready"
        self.error: dict[str, Any] | None = None
        waiting: Mapping[str, Any] = interrupts or {}
        self.interrupts: list[dict[str, Any]] = list(waiting.get("pending", ()))
        self.paused_run: str | None = waiting.get("runId")
        self.custom: list[dict[str, Any]] = []
        self._active: Message | None = None
        self._made_up = False
        self._structured: str | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply one event; events of unknown types change nothing."""
        handler = getattr(self, f"_on_{event['type'].lower()}", None)
        if handler is not None:
            handler(event)

    # -- runs ---------------------------------------------------------------------

    def _on_run_started(self, _: Any) -> None:
        self.status = "streaming"
        self.error = None
        self._active = None

    def _on_run_finished(self, event: Any) -> None:
        self.status = "ready"
        outcome: Any = event.get("outcome") or {}
        self.interrupts = list(outcome.get("interrupts", ()))
        self.paused_run = event["runId"] if self.interrupts else None
        if self._active is not None and _is_blank(self._active):
            self.messages.remove(self._active)
        self._active = None

    def _on_run_error(self, event: Any) -> None:
        self.status = "error"
        self.error = dict(event)
        if self._active is None:
            self._make_up("error")
        self._active = None

    # -- text and reasoning ---------------------------------------------------------

    def _on_text_message_start(self, event: Any) -> None:
        message_id = event["messageId"]
        if self._made_up and self._active is not None:
            self._active["id"] = message_id
            self._made_up = False
            return
        self._active = self._find(message_id)
        if self._active is None:
            self._active = {"id": message_id, "role": event.get("role", "assistant"), "parts": []}
            self.messages.append(self._active)

    def _on_text_message_content(self, event: Any) -> None:
        message = self._find(event["messageId"]) or self._current()
        if self._structured == message["id"]:
            _structure(message)["raw"] += event["delta"]
            return
        _extend(message, "text", event["delta"])

    def _on_reasoning_message_content(self, event: Any) -> None:
        _extend(self._current(), "thinking", event["delta"], event["messageId"])

    # -- tools ------------------------------------------------------------------------

    def _on_tool_call_start(self, event: Any) -> None:
        parent = event.get("parentMessageId")
        owner = (self._find(parent) if parent else None) or self._current()
        call = {
            "type": "tool-call",
            "id": event["toolCallId"],
            "name": event["toolCallName"],
            "arguments": "",
            "state": "awaiting-input",
        }
        owner["parts"].append(call)

    def _on_tool_call_args(self, event: Any) -> None:
        if (found := self._call(event["toolCallId"])) is not None:
            found[1]["arguments"] += event["delta"]
            found[1]["state"] = "input-streaming"

    def _on_tool_call_end(self, event: Any) -> None:
        if (found := self._call(event["toolCallId"])) is None:
            return
        call = found[1]
        call["state"] = "input-complete"
        bag = bag_of(event)
        value = bag["input"] if "input" in bag else parsed(call["arguments"])
        if value is not None:
            call["input"] = value

    def _on_tool_call_result(self, event: Any) -> None:
        if (found := self._call(event["toolCallId"])) is None:
            return
        owner, call = found
        failed = bag_of(event).get("state") == "output-error"
        error = error_text(event["content"]) if failed else None
        outcome = bag_of(event).get("toolResultOutcome")
        settle(owner, call, event["content"], error, event["messageId"], outcome=outcome)

    # -- snapshots and custom events ----------------------------------------------------

    def _on_messages_snapshot(self, event: Any) -> None:
        kept = self.messages
        self.messages = from_rows(event["messages"])
        ids = {message["id"] for message in self.messages}
        for i, row in enumerate(kept):
            if row["role"] == "activity" and row["id"] not in ids:
                before = {message["id"] for message in kept[:i]}
                last = max(
                    (j for j, m in enumerate(self.messages) if m["id"] in before), default=-1
                )
                self.messages.insert(last + 1, row)
        self._active = None

    def _on_activity_snapshot(self, event: Any) -> None:
        row = self._find(event["messageId"])
        content = json.loads(json.dumps(event["content"]))
        part = {"type": "activity", "activityType": event["activityType"], "content": content}
        if row is None:
            row = {"id": event["messageId"], "role": "activity", "parts": [part]}
            if "metadata" in event:
                row["metadata"] = event["metadata"]
            self.messages.append(row)
        elif row["role"] == "activity" and event.get("replace", True):
            row["parts"] = [part]

    def _on_activity_delta(self, event: Any) -> None:
        row = self._find(event["messageId"])
        if row is None or row["role"] != "activity":
            return
        (part,) = row["parts"]
        if part["activityType"] == event["activityType"]:
            row["parts"] = [{**part, "content": _patched(part["content"], event["patch"])}]

    def _on_custom(self, event: Any) -> None:
        name, value = event["name"], event.get("value")
        if name == "ui-resource":
            found = self._call(value["toolCallId"])
            if found is not None:
                found[0]["parts"].append({"type": "ui-resource", **value})
        elif name == "structured-output.start":
            self._structured = self._about(value["messageId"])["id"]
        elif name == "structured-output.complete":
            self._complete(value)
        else:
            self.custom.append(dict(event))

    def _complete(self, value: Any) -> None:
        part = _structure(
            self._about(value["messageId"]) if "messageId" in value else self._current()
        )
        whole = value["object"]
        part.update(status="complete", data=whole, partial=whole, raw=value["raw"])
        if "reasoning" in value:
            part["reasoning"] = value["reasoning"]
        self._structured = None

    # -- pieces -------------------------------------------------------------------------

    def _find(self, message_id: str) -> Message | None:
        return next((m for m in self.messages if m["id"] == message_id), None)

    def _call(self, call_id: str) -> tuple[Message, Part] | None:
        for message in self.messages:
            for part in message["parts"]:
                if part["type"] == "tool-call" and part["id"] == call_id:
                    return message, part
        return None

    def _about(self, message_id: str) -> Message:
        """The message of this id; one that nobody knows is taken for the one that streams."""
        found = self._find(message_id) or self._active
        if found is None:
            found = self._active = {"id": message_id, "role": "assistant", "parts": []}
            self.messages.append(found)
        return found

    def _current(self) -> Message:
        return self._active if self._active is not None else self._make_up("assistant")

    def _make_up(self, why: str) -> Message:
        self._active = {
            "id": f"made-up-{why}-{len(self.messages)}",
            "role": "assistant",
            "parts": [],
        }
        self._made_up = True
        self.messages.append(self._active)
        return self._active


def comparable(messages: Iterable[Mapping[str, Any]], *, row_ids: bool = True) -> list[Message]:
    """Messages as a live view and a reload must agree on: ids, roles, parts and every field of
    a part but times. Tool results that stand together are put in the order of their calls:
    live they come in the order in which tools finished. Without ``row_ids`` the ids of tool
    and reasoning rows do not count; browser clients do not show them."""
    return [
        {"id": m["id"], "role": m["role"], "parts": _in_call_order(m["parts"], row_ids)}
        for m in messages
    ]


def _in_call_order(parts: Iterable[Mapping[str, Any]], row_ids: bool) -> list[Part]:
    clean = [{k: v for k, v in part.items() if k != "createdAt"} for part in parts]
    for part in clean:
        if part["type"] == "tool-result" and {*part.get("metadata", {})} == {"tanstack"}:
            del part["metadata"]  # of the row, not of the part
        if not row_ids and part["type"] in ("tool-result", "thinking"):
            part.pop("id", None)
    place = {p["id"]: i for i, p in enumerate(clean) if p["type"] == "tool-call"}
    results = [i for i, part in enumerate(clean) if part["type"] == "tool-result"]
    ordered = sorted((clean[i] for i in results), key=lambda p: place.get(p["toolCallId"], -1))
    for i, part in zip(results, ordered, strict=True):
        clean[i] = part
    return clean


def _structure(message: Message) -> Part:
    """The structured part of a message, made if it has none."""
    parts: list[Part] = message["parts"]
    for part in parts:
        if part["type"] == "structured-output":
            return part
    part = {"type": "structured-output", "status": "streaming", "raw": ""}
    parts.append(part)
    return part


def _patched(content: Any, patch: list[dict[str, Any]]) -> Any:
    """``content`` with an RFC 6902 patch; as it was where the patch does not fit."""
    try:
        result: Any = jsonpatch.apply_patch(content, patch)
    except jsonpatch.JsonPatchException:
        return content
    return cast("Message", result) if isinstance(result, dict) else content


def _extend(message: Message, kind: str, delta: str, row_id: str | None = None) -> None:
    parts: list[Part] = message["parts"]
    if not parts or parts[-1]["type"] != kind or parts[-1].get("id") != row_id:
        if not delta:
            return
        parts.append({"type": kind, "content": "", **({"id": row_id} if row_id else {})})
    parts[-1]["content"] += delta


def _is_blank(message: Message) -> bool:
    return all(p["type"] == "text" and not p["content"].strip() for p in message["parts"])
