"""Reading a chat request: what the browser posts, checked before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from ag_ui.core import Context, Tool
from typing_extensions import TypeIs

from chatkeep.codec import encode, normalize
from chatkeep.engine.tools import client_tools_of_request
from chatkeep.errors import BadRequest, CompositionError, InvalidValue, ToolError
from chatkeep.messages import wire_to_model
from chatkeep.records import UNSET, ModelMessage, Unset
from chatkeep.scope import check_id
from chatkeep.web._json import decode_body

if TYPE_CHECKING:
    from starlette.requests import Request

    from chatkeep.backends import Persistence
    from chatkeep.engine import AbortSignal

__all__ = ["SEEN_HEADER", "ChatParams", "parse_chat_request"]

SEEN_HEADER: Final = "x-thread-seen"
"""Header with the highest sequence number that the client has been shown."""

_ROLES = frozenset({"user", "assistant", "system", "developer", "tool", "reasoning", "activity"})
_MAX_SEEN = 2**63
_MAX_TOOLS = 256
_MAX_TOOL_BYTES = 1 << 20
"""Checking a schema costs about a millisecond per kilobyte, in which nobody else is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParams:
    """A chat request that was understood.

    ``messages`` are in the stored form. ``tools`` are those of the browser, ``context`` what
    it says about its surroundings; ``state`` is absent when it sent none. ``seen`` is the
    highest sequence number that it has been shown, None when it did not say. A router adds
    the last three: the request, its persistence, and the signal that stops the run.
    """

    thread_id: str
    run_id: str
    parent_run_id: str | None = None
    messages: list[ModelMessage] = field(default_factory=list[ModelMessage])
    tools: list[Tool] = field(default_factory=list[Tool])
    context: list[Context] = field(default_factory=list[Context])
    state: Any | Unset = UNSET
    forwarded_props: dict[str, Any] = field(default_factory=dict[str, Any])
    resume: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seen: int | None = None
    request: Request | None = None
    store: Persistence | None = None
    abort: AbortSignal | None = None

    @property
    def persistence(self) -> Persistence:
        """The router's persistence, in the scope of the request.

        Raises:
            CompositionError: the request was not read by a router.
        """
        if self.store is None:
            raise CompositionError("only a chat_router says which persistence a request is for")
        return self.store

    def chat_kwargs(self) -> dict[str, Any]:
        """What of this goes into :func:`chatkeep.engine.chat`, by keyword::

            chat(adapter=model, tools=tools, **params.chat_kwargs())

        ``context`` is not among it: what a browser says about itself is no input for tools
        unless the application says so.
        """
        return {
            "thread_id": self.thread_id,
            "run_id": self.run_id,
            "parent_run_id": self.parent_run_id,
            "messages": self.messages,
            "client_tools": self.tools,
            "state": self.state,
            "forwarded_props": self.forwarded_props,
            "resume": self.resume,
            "seen": self.seen,
            "abort": self.abort,
        }


def parse_chat_request(
    body: bytes | Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> ChatParams:
    """Read the body of a chat post.

    Required: ``threadId``, ``runId``, ``messages``. ``tools``, ``context``, ``state``,
    ``forwardedProps``, ``resume`` and ``parentRunId`` may be absent or null. Unknown keys are
    ignored at the top and kept in messages; ``parts`` of a message are dropped (what counts on
    the wire is ``content``). An assistant's content may be null, a tool's a list of parts.
    There may be 256 tools, of 1 MiB together.

    Args:
        body: the bytes, or the JSON object that they hold.
        headers: ``X-Thread-Seen`` and ``X-Run-Id`` are read, in any case.

    Raises:
        BadRequest: names the place and what is wrong with it; nothing has been touched.
    """
    value = decode_body(body) if isinstance(body, bytes) else body
    top = _object(value, "$")
    given = {name.lower(): text for name, text in (headers or {}).items()}
    thread_id = _id(top, "threadId", "$")
    run_id = _id(top, "runId", "$")
    if given.get("x-run-id", run_id) != run_id:
        raise BadRequest("$.runId", "is not the run of the X-Run-Id header")
    rows = [_row(row, f"$.messages[{i}]") for i, row in enumerate(_list(top, "messages", "$"))]
    given_props: Any = {} if top.get("forwardedProps") is None else top["forwardedProps"]
    props = _plain(_object(given_props, "$.forwardedProps"), "$.forwardedProps")
    state = top.get("state", UNSET)
    return ChatParams(
        thread_id=thread_id,
        run_id=run_id,
        parent_run_id=_id(top, "parentRunId", "$") if top.get("parentRunId") is not None else None,
        messages=_messages(rows),
        tools=_tools(top),
        context=_each(top, "context", _context),
        state=state if state is UNSET else _plain(state, "$.state"),
        forwarded_props=props,
        resume=_each(top, "resume", _resume_entry),
        seen=_seen(given.get(SEEN_HEADER), props.get("threadSeen")),
    )


# --------------------------------------------------------------------------- messages


def _row(value: Any, path: str) -> dict[str, Any]:
    """A message row: checked, without nulls that stand for absence and without ``parts``."""
    row = {k: v for k, v in _object(value, path).items() if k != "parts"}
    for name in ("name", "error", "metadata", "toolCalls", "encryptedValue", "createdAt"):
        if name in row and row[name] is None:
            del row[name]
    _id(row, "id", path)
    role = _text(row, "role", path)
    if role not in _ROLES:
        raise BadRequest(f"{path}.role", f"{role!r} is not a role; it is one of {_known()}")
    for name in ("name", "error", "encryptedValue", "createdAt"):
        if name in row:
            _text(row, name, path)
    if "metadata" in row:
        _object(row["metadata"], f"{path}.metadata")
    _content(row, role, path)
    for i, call in enumerate(_list(row, "toolCalls", path) if "toolCalls" in row else ()):
        _tool_call(call, f"{path}.toolCalls[{i}]")
    if role == "tool":
        _id(row, "toolCallId", path)
    if role == "activity":
        _text(row, "activityType", path)
    return cast("dict[str, Any]", _plain(row, path))


def _messages(rows: list[dict[str, Any]]) -> list[ModelMessage]:
    try:
        return wire_to_model(rows).messages
    except InvalidValue as error:
        raise BadRequest(f"$.messages ({error.path})", error.reason) from None


def _content(row: dict[str, Any], role: str, path: str) -> None:
    content = row.get("content")
    where = f"{path}.content"
    if role == "activity":
        _object(content, where)
    elif role == "assistant" and content is None:
        return
    elif role in ("user", "tool") and _is_list(content):
        for i, part in enumerate(content):
            _text(_object(part, f"{where}[{i}]"), "type", f"{where}[{i}]")
    elif not isinstance(content, str):
        allowed = "text or a list of parts" if role in ("user", "tool") else "text"
        raise BadRequest(where, f"must be {allowed}, not {_kind(content)}")


def _tool_call(value: Any, path: str) -> None:
    call = _object(value, path)
    _id(call, "id", path)
    function = _object(call.get("function"), f"{path}.function")
    _text(function, "name", f"{path}.function")
    _text(function, "arguments", f"{path}.function")


def _known() -> str:
    return ", ".join(sorted(_ROLES))


# ------------------------------------------------------------------------ other fields


def _tools(top: Mapping[str, Any]) -> list[Tool]:
    if top.get("tools") is None:
        return []
    given = _list(top, "tools", "$")
    if len(given) > _MAX_TOOLS:
        raise BadRequest("$.tools", f"has {len(given)} tools; the limit is {_MAX_TOOLS}")
    size = len(_encoded(given, "$.tools"))
    if size > _MAX_TOOL_BYTES:
        raise BadRequest("$.tools", f"has {size} bytes; the limit is {_MAX_TOOL_BYTES}")
    return _each(top, "tools", _tool)


def _tool(value: Any, path: str) -> Tool:
    tool = _object(value, path)
    if not _text(tool, "name", path):
        raise BadRequest(f"{path}.name", "must not be empty")
    description = _text(tool, "description", path) if tool.get("description") is not None else ""
    parameters = tool.get("parameters")
    if parameters is not None:
        _object(parameters, f"{path}.parameters")
    metadata = tool.get("metadata")
    if metadata is not None:
        _object(metadata, f"{path}.metadata")
    plain = _plain({**tool, "description": description}, path)
    try:
        client_tools_of_request([plain])
    except ToolError as error:
        raise BadRequest(f"{path}.parameters", str(error)) from None
    return Tool.model_validate({k: v for k, v in plain.items() if v is not None})


def _context(value: Any, path: str) -> Context:
    item = _object(value, path)
    _text(item, "description", path)
    _text(item, "value", path)
    return Context.model_validate(_plain(item, path))


def _resume_entry(value: Any, path: str) -> dict[str, Any]:
    entry = _object(value, path)
    _id(entry, "interruptId", path)
    if _text(entry, "status", path) not in ("resolved", "cancelled"):
        raise BadRequest(f"{path}.status", "must be 'resolved' or 'cancelled'")
    if entry.get("metadata") is not None:
        _object(entry["metadata"], f"{path}.metadata")
    return cast("dict[str, Any]", _plain(entry, path))


def _seen(header: str | None, prop: Any) -> int | None:
    if header is not None:
        text = header.strip()
        if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) >= _MAX_SEEN:
            raise BadRequest("X-Thread-Seen", "must be a sequence number")
        return int(text)
    if prop is None:
        return None
    if isinstance(prop, bool) or not isinstance(prop, int) or not 0 <= prop < _MAX_SEEN:
        raise BadRequest("$.forwardedProps.threadSeen", "must be a sequence number")
    return prop


# ------------------------------------------------------------------------------ pieces


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(value.__class__, "a number")


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRequest(path, f"must be an object, not {_kind(value)}")
    return cast("Mapping[str, Any]", value)


def _present(owner: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in owner:
        raise BadRequest(f"{path}.{name}", "is missing")
    return owner[name]


def _list(owner: Mapping[str, Any], name: str, path: str) -> list[Any]:
    value = _present(owner, name, path)
    if not _is_list(value):
        raise BadRequest(f"{path}.{name}", f"must be a list, not {_kind(value)}")
    return value


def _is_list(value: Any) -> TypeIs[list[Any]]:
    return isinstance(value, list)


def _text(owner: Mapping[str, Any], name: str, path: str) -> str:
    value = _present(owner, name, path)
    if not isinstance(value, str):
        raise BadRequest(f"{path}.{name}", f"must be text, not {_kind(value)}")
    return value


def _id(owner: Mapping[str, Any], name: str, path: str) -> str:
    value = _text(owner, name, path)
    try:
        return check_id(value, f"{path}.{name}")
    except InvalidValue as error:
        raise BadRequest(error.path, error.reason) from None


def _each(owner: Mapping[str, Any], name: str, read: Callable[[Any, str], Any]) -> list[Any]:
    if owner.get(name) is None:
        return []
    return [read(item, f"$.{name}[{i}]") for i, item in enumerate(_list(owner, name, "$"))]


def _encoded(value: Any, path: str) -> bytes:
    try:
        return encode(value, path)
    except InvalidValue as error:
        raise BadRequest(error.path, error.reason) from None


def _plain(value: Any, path: str) -> Any:
    """What the codec makes of it, so that nothing unstorable gets any further."""
    try:
        return normalize(value, path)
    except InvalidValue as error:
        raise BadRequest(error.path, error.reason) from None
