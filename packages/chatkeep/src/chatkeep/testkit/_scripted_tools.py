"""The tools that the scripted scenarios call, and the constants that a browser must share.

An interrupt carries hashes of these schemas: a browser that registers the same tools must use
the same JSON (key order does not matter).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import anyio

from chatkeep.engine.tools import Tool, ToolContext, client_tool, define_tool

__all__ = [
    "STRUCTURED_SCHEMA",
    "TOOL_SCHEMAS",
    "WIDGET",
    "ScriptedFailure",
    "browser_tools",
    "scripted_tools",
]


class ScriptedFailure(Exception):
    """How the failing scenarios fail: as a provider's client library would, by raising."""


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": dict(properties)}
    if properties:
        schema["required"] = list(properties)
    return {**schema, "additionalProperties": False}


_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "number"}

TOOL_SCHEMAS: Final[Mapping[str, Mapping[str, Any]]] = {
    "get_weather": {
        "description": "Weather for a city (server tool).",
        "input": _object(city=_TEXT),
    },
    "failing_tool": {
        "description": "Server tool that always throws.",
        "input": _object(reason=_TEXT),
    },
    "send_email": {
        "description": "Send an email (server tool, needs approval).",
        "input": _object(to=_TEXT, subject=_TEXT),
    },
    "transfer": {
        "description": "Move money (server tool, needs approval with a form).",
        "input": _object(amount=_NUMBER),
        "approval": {"approve": _object(pin=_TEXT), "reject": _object(reason=_TEXT)},
    },
    "long_job": {
        "description": "A job that takes its time (server tool).",
        "input": _object(ms=_NUMBER),
    },
    "approved_job": {
        "description": "A job that takes its time (server tool, needs approval).",
        "input": _object(ms=_NUMBER),
    },
    "get_location": {
        "description": "Browser location (client tool).",
        "input": _object(accuracy=_TEXT),
        "output": _object(city=_TEXT),
    },
    "pick_color": {
        "description": "Ask the user for a colour (client tool, no output schema).",
        "input": _object(palette=_TEXT),
    },
    "share_photo": {
        "description": "A photo from the device (client tool, needs approval).",
        "input": _object(album=_TEXT),
        "output": _object(url=_TEXT),
    },
    "show_widget": {
        "description": "Show an MCP Apps widget (server tool).",
        "input": _object(kind=_TEXT),
    },
    "await_widget_result": {
        "description": "Wait for the widget answer (client tool, no output schema).",
        "input": _object(),
    },
    "adhoc_client_tool": {
        "description": "Client tool the server only learns about from the request.",
        "input": _object(q=_NUMBER),
    },
}
"""JSON Schemas of the scripted tools by name: ``input``, and where there is one ``output`` and
``approval``. ``adhoc_client_tool`` is no tool of the server."""

STRUCTURED_SCHEMA: Final[Mapping[str, Any]] = _object(name=_TEXT, age=_NUMBER)
"""What the scenario ``structured`` answers; a route gives it as ``output_schema``."""

WIDGET: Final[Mapping[str, Any]] = {
    "resource": {
        "uri": "ui://clientlab/fireflies",
        "mimeType": "text/html",
        "text": "<p>fireflies</p>",
    },
    "serverId": "clientlab",
    "toolName": "show_widget",
}
"""The ``ui-resource`` that ``show_widget`` emits, without its ``toolCallId``."""


def _get_weather(args: dict[str, Any]) -> dict[str, Any]:
    return {"city": args["city"], "tempC": 21}


def _failing_tool(args: dict[str, Any]) -> None:
    raise ScriptedFailure(f"tool failed: {args['reason']}")


def _send_email(args: dict[str, Any]) -> dict[str, Any]:
    return {"sent": True, "to": args["to"]}


def _transfer(args: dict[str, Any]) -> dict[str, Any]:
    return {"moved": args["amount"]}


async def _job(args: dict[str, Any]) -> dict[str, Any]:
    await anyio.sleep(args["ms"] / 1000)
    return {"done": True}


async def _show_widget(_: dict[str, Any], context: ToolContext) -> str:
    await context.emit_custom_event("ui-resource", dict(WIDGET))
    return "widget shown"


_SERVER: Final[Mapping[str, Callable[..., Any]]] = {
    "get_weather": _get_weather,
    "failing_tool": _failing_tool,
    "send_email": _send_email,
    "transfer": _transfer,
    "long_job": _job,
    "approved_job": _job,
    "show_widget": _show_widget,
}
_BROWSER: Final = ("get_location", "pick_color", "share_photo", "await_widget_result")
_ASKING: Final = frozenset({"send_email", "transfer", "approved_job", "share_photo"})


def scripted_tools() -> list[Tool]:
    """The tools that the scenarios call: server tools, then those of the browser."""
    server = [
        define_tool(
            name=name,
            description=TOOL_SCHEMAS[name]["description"],
            input_schema=TOOL_SCHEMAS[name]["input"],
            execute=execute,
            needs_approval=name in _ASKING,
            **_approval(name),
        )
        for name, execute in _SERVER.items()
    ]
    browser = [
        client_tool(
            name,
            description=TOOL_SCHEMAS[name]["description"],
            input_schema=TOOL_SCHEMAS[name]["input"],
            output_schema=TOOL_SCHEMAS[name].get("output"),
            needs_approval=name in _ASKING,
        )
        for name in _BROWSER
    ]
    return [*server, *browser]


def _approval(name: str) -> dict[str, Any]:
    schema = TOOL_SCHEMAS[name].get("approval")
    return {} if schema is None else {"approval_schema": schema}


def browser_tools(*names: str) -> list[dict[str, Any]]:
    """Entries of a request's ``tools[]``, as a page that has registered these tools posts them;
    by default what a page of the scenarios registers: the browser's, and ``send_email``."""
    return [
        {
            "name": name,
            "description": TOOL_SCHEMAS[name]["description"],
            "parameters": TOOL_SCHEMAS[name]["input"],
        }
        for name in names or ("send_email", "get_location", "pick_color", "await_widget_result")
    ]
