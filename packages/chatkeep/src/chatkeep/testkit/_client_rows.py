"""Rows of the wire and messages of a page, as the browser client turns one into the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

__all__ = ["Message", "Part", "bag_of", "error_text", "from_rows", "parsed", "settle", "wire_rows"]

Message = dict[str, Any]
Part = dict[str, Any]

_APPROVED = {"approved": True, "pendingExecution": True, "message": "User approved this action"}
_DENIED = {"approved": False, "message": "User denied this action"}


# --------------------------------------------------------------------------- page to wire


def wire_rows(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ``messages`` that a page showing ``messages`` posts: every UI message as an anchor
    row, with reasoning rows before and tool rows after it. An activity goes out as the empty
    assistant that client 0.33 makes of it."""
    rows: list[dict[str, Any]] = []
    for message in messages:
        parts = message["parts"]
        row: dict[str, Any] = {"id": message["id"], "role": message["role"]}
        if message["role"] == "activity":
            rows.append({"id": message["id"], "role": "assistant"})
            continue
        bag = {"createdAt": message["createdAt"]} if "createdAt" in message else {}
        given = message.get("metadata", {})
        widgets = [dict(p) for p in parts if p["type"] == "ui-resource"]
        bag = {**bag, **given.get("tanstack", {}), **({"uiResources": widgets} if widgets else {})}
        if given or bag:
            row["metadata"] = {**given, **({"tanstack": bag} if bag else {})}
        if message["role"] != "assistant":
            rows.append({**row, "content": _user_content(parts)})
            continue
        for i, part in enumerate(p for p in parts if p["type"] == "thinking"):
            reasoning_id = f"{message['id']}-reasoning-{i}"
            rows.append({"id": reasoning_id, "role": "reasoning", "content": part["content"]})
        text = "".join(_posted_text(part) for part in parts)
        calls = [_posted_call(p) for p in parts if p["type"] == "tool-call"]
        rows.append(
            {
                **row,
                **({"content": text} if text else {}),
                **({"toolCalls": calls} if calls else {}),
            }
        )
        results = [p for p in parts if p["type"] == "tool-result"]
        answered = {p["toolCallId"] for p in results}
        rows += [_posted_result(p) for p in results]
        rows += [
            _placeholder(p)
            for p in parts
            if p["type"] == "tool-call" and "approval" in p and p["id"] not in answered
        ]
    return rows


def _user_content(parts: list[Part]) -> str | list[Part]:
    if all(part["type"] == "text" for part in parts):
        return "".join(part["content"] for part in parts)
    return [
        {"type": "text", "text": part["content"]} if part["type"] == "text" else dict(part)
        for part in parts
    ]


def _posted_text(part: Part) -> str:
    if part["type"] == "text":
        return cast("str", part["content"])
    whole = part["type"] == "structured-output" and part["status"] == "complete"
    return cast("str", part["raw"]) if whole else ""


def _posted_call(part: Part) -> dict[str, Any]:
    function = {"name": part["name"], "arguments": part["arguments"]}
    return {"id": part["id"], "type": "function", "function": function}


def _posted_result(part: Part) -> dict[str, Any]:
    row = _tool_row(part["toolCallId"], part["content"])
    return {**row, "error": part["error"]} if "error" in part else row


def _placeholder(call: Part) -> dict[str, Any]:
    """What stands for the result of a call that was decided and did not run yet."""
    content = _APPROVED if call["approval"]["approved"] else _DENIED
    return _tool_row(call["id"], json.dumps(content, separators=(",", ":")))


def _tool_row(call_id: str, content: str) -> dict[str, Any]:
    return {
        "id": f"tool-{call_id}",
        "role": "tool",
        "toolCallId": call_id,
        "content": content,
        "metadata": {"tanstack": {"toolResult": {}}},
    }


# --------------------------------------------------------------------------- wire to page


def from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Snapshot rows as UI messages."""
    messages: list[Message] = []
    thinking: list[Part] = []
    for row in rows:
        if row["role"] == "reasoning":
            part = {"type": "thinking", "id": row["id"], "content": row["content"]}
            thinking.append(part)
        elif row["role"] == "tool":
            for message in messages:
                for part in message["parts"]:
                    if part["type"] == "tool-call" and part["id"] == row["toolCallId"]:
                        settle(
                            message,
                            part,
                            row["content"],
                            row.get("error"),
                            row["id"],
                            outcome=bag_of(row).get("toolResultOutcome"),
                        )
                        break
        else:
            messages.append(_message(row, thinking))
            thinking = []
    return messages


def _message(row: Mapping[str, Any], thinking: list[Part]) -> Message:
    message: Message = {"id": row["id"], "role": row["role"]}
    if row["role"] == "activity":
        part = {"type": "activity", "activityType": row["activityType"], "content": row["content"]}
        return {**message, "parts": [part]}
    message["parts"] = [*thinking, *_row_parts(row)]
    bag = bag_of(row)
    if "createdAt" in bag:
        message["createdAt"] = bag["createdAt"]
    if "metadata" in row:
        message["metadata"] = row["metadata"]
    return message


def _row_parts(row: Any) -> list[Part]:
    content = row.get("content")
    structured = bag_of(row).get("structuredOutput")
    parts: list[Part] = []
    if isinstance(content, str) and content:
        raw = structured["raw"] if structured else ""
        text = content.removesuffix(raw) if raw else content
        parts += [{"type": "text", "content": text}] if text else []
    elif isinstance(content, list):
        for part in cast("list[Part]", content):
            is_text = part["type"] == "text"
            parts.append({"type": "text", "content": part["text"]} if is_text else dict(part))
    if structured:
        parts.append({**structured, "type": "structured-output"})
    for call in row.get("toolCalls", ()):
        arguments = call["function"]["arguments"]
        value = parsed(arguments)
        part = {
            "type": "tool-call",
            "id": call["id"],
            "name": call["function"]["name"],
            "arguments": arguments,
            "state": "input-complete",
        }
        parts.append(part if value is None else {**part, "input": value})
    parts += [dict(r) for r in bag_of(row).get("uiResources", ())]
    return parts


def settle(
    owner: Message,
    call: Part,
    content: str,
    error: str | None,
    row_id: str,
    *,
    outcome: str | None = None,
) -> None:
    """Give a call its result, in place of one that it has. ``outcome`` is what a person made of
    it instead of its execution: ``denied`` or ``cancelled``."""
    state = "complete" if error is None else "error"
    call["state"] = state
    call["output"] = parsed(content) if parsed(content) is not None else content
    call.pop("approval", None)
    result = {
        "type": "tool-result",
        "id": row_id,
        "toolCallId": call["id"],
        "content": content,
        "state": state,
    }
    if error is not None:
        result["error"] = error
    if outcome is not None:
        result["outcome"] = outcome
    parts: list[Part] = owner["parts"]
    for i, part in enumerate(parts):
        if part["type"] == "tool-result" and part["toolCallId"] == call["id"]:
            parts[i] = result
            return
    parts.append(result)


def bag_of(owner: Any) -> dict[str, Any]:
    """``metadata.tanstack`` of an event or a row; empty where there is none."""
    metadata: dict[str, Any] = owner.get("metadata") or {}
    bag: dict[str, Any] = metadata.get("tanstack") or {}
    return bag


def parsed(text: Any) -> Any:
    """The JSON in a text, or None."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def error_text(content: str) -> str:
    """What a failed result says: its error, its text, or that it failed."""
    value = parsed(content)
    if isinstance(value, dict) and isinstance(cast("Part", value).get("error"), str):
        return cast("str", value["error"])
    return content if value is None else "Tool execution failed"
