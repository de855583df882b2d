"""Rows of a request to model messages.

Accepted is the union of what clients send: AG-UI wire rows (of 1.0 and of older clients), UI
messages with ``parts``, and model messages, mixed in one list. What AG-UI keeps apart is put
together again:

* reasoning rows become the ``thinking`` of the next assistant row of the turn (a user row in
  between ends the turn: thoughts never move to another one);
* ``metadata.tanstack``: ``createdAt``, ``structuredOutput``, ``toolCallMetadata`` and, on tool
  rows, ``toolResult`` move to the fields they stand for; every other key stays. A tool row is
  given the id and content that ``toolResult`` says it owns; ``{}`` says that the id on the wire
  was made up and is dropped;
* ``encryptedValue`` of a call becomes its ``metadata.thoughtSignature``;
* activity rows and rows tagged with ``subagentRunId`` are not part of the transcript: they
  come back beside it.

``null`` is absence and is dropped. Keys that nobody here knows are kept. A row that is
already a model message comes back by identity.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from pydantic import BaseModel

from chatkeep.errors import InvalidValue
from chatkeep.messages.ids import reasoning_id
from chatkeep.messages.parts import (
    Row,
    bag_of,
    collapse_text,
    is_content_parts,
    is_list,
    is_row,
    is_thought,
    iso_time,
    put_bag,
)
from chatkeep.messages.ui import ui_to_model
from chatkeep.records import ActivityRecord, ModelMessage
from chatkeep.scope import check_id

__all__ = ["Inbound", "wire_to_model"]

_STRUCTURED = ("streaming", "complete", "error")


@dataclass(frozen=True, slots=True)
class Inbound:
    """What a request's ``messages`` held.

    ``activities`` have as ``index`` their position among the UI rows of the request, and as
    ``anchor`` the id of the message that they follow in it.
    ``children`` are the rows tagged with ``subagentRunId``, as they came.
    """

    messages: list[ModelMessage] = field(default_factory=list[ModelMessage])
    activities: list[ActivityRecord] = field(default_factory=list[ActivityRecord])
    children: list[Row] = field(default_factory=list[Row])


def wire_to_model(rows: Sequence[Mapping[str, Any] | BaseModel], *, path: str = "$") -> Inbound:
    """Read the messages of a request; ``path`` is where the list stands in it.

    Raises:
        InvalidValue: a malformed row; its path names the row and the key.
    """
    given: object = rows
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidValue(path, "must be a list of messages")
    plain = [_plain(row, f"{path}[{i}]") for i, row in enumerate(rows)]
    reader = _Reader(path, _answered_by_parts(plain))
    for index, row in enumerate(plain):
        reader.read(index, row)
    return reader.out


def _plain(row: object, where: str) -> Row:
    if is_row(row):
        return row
    if isinstance(row, BaseModel):
        return row.model_dump(by_alias=True, exclude_none=True)
    if isinstance(row, Mapping):
        return dict(cast("Mapping[str, Any]", row))
    raise InvalidValue(where, "must be a message object")


def _answered_by_parts(rows: Sequence[Row]) -> frozenset[str]:
    """Calls whose result stands in a UI message: a tool row for one of them is a repeat."""
    return frozenset(
        part["toolCallId"]
        for row in rows
        if is_list(row.get("parts"))
        for part in row["parts"]
        if is_row(part) and part.get("type") == "tool-result" and "toolCallId" in part
    )


class _Reader:
    def __init__(self, path: str, answered: frozenset[str]) -> None:
        self.out = Inbound()
        self._path = path
        self._answered = answered
        self._thinking: list[Row] = []
        self._ui_rows = 0
        self._shown: str | None = None  # id of the last UI row that is a message
        self._open: str | None = None  # id of the assistant message that rows still add to
        self._index = 0
        self._by_role: dict[str, Callable[[Row], Row | None]] = {
            "user": self._user,
            "assistant": self._assistant,
            "tool": self._tool,
            "system": self._system,
            "developer": self._system,
            "reasoning": self._reasoning,
            "activity": self._activity,
        }

    def fail(self, key: str, reason: str) -> NoReturn:
        raise InvalidValue(f"{self._path}[{self._index}]{key}", reason)

    def read(self, index: int, row: Row) -> None:
        self._index = index
        role = row.get("role")
        take = self._by_role.get(role) if isinstance(role, str) else None
        if take is None:
            self.fail(".role", f"must be one of {', '.join(self._by_role)}, not {role!r}")
        if row.get("subagentRunId") is not None:
            self.out.children.append(row)
            return
        if row.get("parts") is not None and role != "activity":
            self._ui(row)
            return
        message = take(self._shared(row))
        if message is not None:
            # Equality costs little here: most values are the very same objects.
            kept = row if message == row else message
            self.out.messages.append(cast("ModelMessage", kept))

    def _shared(self, row: Row) -> Row:
        """A copy without nulls; id, name, metadata and creation time are checked."""
        out = {k: v for k, v in row.items() if v is not None or k == "content"}
        name = out.get("id")
        if name == "":
            del out["id"]
        elif name is not None:
            check_id(name, f"{self._path}[{self._index}].id")
        for key in ("name", "error"):
            if key in out and not isinstance(out[key], str):
                self.fail(f".{key}", "must be text")
        if "metadata" in out and not is_row(out["metadata"]):
            self.fail(".metadata", "must be an object")
        self._known_shapes(out)
        bag = bag_of(out)
        if "createdAt" in out or "createdAt" in bag:
            time = iso_time(out.pop("createdAt", None)) or iso_time(bag.get("createdAt"))
            if time is not None:
                out["createdAt"] = time
            if "createdAt" in bag:
                put_bag(out, {k: v for k, v in bag.items() if k != "createdAt"})
        return out

    def _known_shapes(self, out: Row) -> None:
        """Refuse, on rows of any role, what readers of stored rows rely on: a row of another
        shape would fail every later page load of its thread."""
        if "thinking" in out:
            entries = out["thinking"]
            if not is_list(entries) or not all(is_row(e) for e in entries):
                self.fail(".thinking", "must be a list of objects")
            for i, entry in enumerate(cast("list[Row]", entries)):
                self._texts(entry, ("id", "content", "signature"), f".thinking[{i}]")
        if "structuredOutput" in out:
            if not is_row(out["structuredOutput"]):
                self.fail(".structuredOutput", "must be an object")
            self._texts(out["structuredOutput"], ("status", "raw"), ".structuredOutput")
        if "toolCalls" in out:
            calls = out["toolCalls"]
            if not is_list(calls):
                self.fail(".toolCalls", "must be a list")
            for i, call in enumerate(calls):
                if not is_row(call):
                    self.fail(f".toolCalls[{i}]", "must be an object")
                check_id(call.get("id"), f"{self._path}[{self._index}].toolCalls[{i}].id")
                function = call.get("function")
                if not is_row(function) or not isinstance(function.get("name"), str):
                    self.fail(f".toolCalls[{i}].function", "must be an object with a name")
                self._texts(function, ("arguments",), f".toolCalls[{i}].function")

    def _texts(self, owner: Row, keys: Sequence[str], where: str) -> None:
        for key in keys:
            if not isinstance(owner.get(key), str | None):
                self.fail(f"{where}.{key}", "must be text")

    # ------------------------------------------------------------------------- roles

    def _user(self, out: Row) -> Row:
        self._boundary(out)
        out["content"] = self._content(out.get("content"), "")
        return out

    def _system(self, out: Row) -> Row:
        self._boundary(out)
        out["role"] = "system"
        out["content"] = self._content(out.get("content"), "")
        return out

    def _assistant(self, out: Row) -> Row:
        name = out.get("id")
        if name is None or name != self._open:
            self._ui_rows += 1
        self._open = self._shown = name
        content = self._content(out.get("content"), None)
        out["content"] = content
        bag = bag_of(out)
        moved = {"toolCallMetadata", "structuredOutput"} & bag.keys()
        rest = {k: v for k, v in bag.items() if k not in moved}
        by_call = bag.get("toolCallMetadata")
        known: Row = dict(by_call) if is_row(by_call) else {}
        if calls := out.get("toolCalls"):
            out["toolCalls"] = [self._call(c, known) for c in calls]
        else:
            out.pop("toolCalls", None)
        if moved:
            if known:
                rest["toolCallMetadata"] = known
            structured = self._structured(bag.get("structuredOutput"))
            if structured is not None and "structuredOutput" not in out:
                out["structuredOutput"] = structured
            put_bag(out, rest)
        self._attach_thinking(out)
        return out

    def _attach_thinking(self, out: Row) -> None:
        entries = [*cast("list[Row]", out.get("thinking", [])), *self._thinking]
        self._thinking = []
        name = out.get("id")
        if name is not None:
            # An id that any reader derives again is no id of the entry's own.
            entries = [
                {k: v for k, v in e.items() if k != "id"}
                if e.get("id") == reasoning_id(name, i)
                else e
                for i, e in enumerate(entries)
            ]
        if entries:
            out["thinking"] = entries
        else:
            out.pop("thinking", None)

    @staticmethod
    def _call(call: Row, known: Row) -> Row:
        name, function = call["id"], call["function"]
        out = {k: v for k, v in call.items() if v is not None}
        out.setdefault("type", "function")
        if function.get("arguments") is None:
            out["function"] = {**function, "arguments": ""}
        if name in known:
            bagged = known.pop(name)
            own = out.get("metadata")
            out["metadata"] = {**own, **bagged} if is_row(own) and is_row(bagged) else bagged
        signature = out.pop("encryptedValue", None)
        if signature and isinstance(signature, str):
            metadata = out.get("metadata")
            out["metadata"] = {
                **(metadata if is_row(metadata) else {}),
                "thoughtSignature": signature,
            }
        if out.get("metadata", 0) is None:
            del out["metadata"]
        return call if out == call else out

    def _tool(self, out: Row) -> Row | None:
        call = check_id(out.get("toolCallId"), f"{self._path}[{self._index}].toolCallId")
        if call in self._answered:
            return None
        content = out.get("content")
        if is_list(content):
            out["content"] = self._parts(content) or ""
        elif content is None:
            out["content"] = ""
        elif not isinstance(content, str):
            self.fail(".content", "must be text or a list of parts")
        bag = bag_of(out)
        owned = bag.get("toolResult")
        if is_row(owned):
            out = self._restore(out, bag, owned)
        return out

    def _restore(self, out: Row, bag: Row, owned: Row) -> Row:
        """Give a tool row what it owned before it went over the wire."""
        if owned.get("content") is not None and not is_content_parts(owned["content"]):
            return out
        for key in ("id", "createdAt"):
            out.pop(key, None)
        if isinstance(owned.get("id"), str) and owned["id"]:
            out["id"] = check_id(owned["id"], f"{self._path}[{self._index}].metadata")
        created = iso_time(owned.get("createdAt"))
        if created is not None:
            out["createdAt"] = created
        if owned.get("content") is not None:
            out["content"] = owned["content"]
        put_bag(out, {k: v for k, v in bag.items() if k != "toolResult"})
        return out

    def _reasoning(self, out: Row) -> None:
        entry = {k: v for k, v in out.items() if k not in {"role", "encryptedValue", "content"}}
        content = out.get("content")
        if content is not None and not isinstance(content, str):
            self.fail(".content", "must be text")
        bag = bag_of(out)
        signature = out.get("encryptedValue") or bag.get("signature")
        if not isinstance(signature, str | None):
            self.fail("", "a signature must be text")
        if "signature" in bag:
            put_bag(entry, {k: v for k, v in bag.items() if k != "signature"})
        entry["content"] = content or ""
        if signature:
            entry["signature"] = signature
        if is_thought(entry):
            self._thinking.append(entry)

    def _activity(self, out: Row) -> None:
        kind, content = out.get("activityType"), out.get("content")
        parts = cast("list[Any]", out.get("parts") or [])
        for part in parts:
            if is_row(part) and part.get("type") == "activity":
                kind, content = part.get("activityType"), part.get("content")
        if not isinstance(kind, str) or not is_row(content):
            self.fail("", "an activity needs an activityType and an object as content")
        self._open = None
        self.out.activities.append(
            ActivityRecord(
                id=out.get("id") or f"activity-{uuid.uuid4()}",
                activity_type=kind,
                content=content,
                index=self._ui_rows,
                metadata=out.get("metadata"),
                anchor=self._shown,
            )
        )
        self._ui_rows += 1

    def _ui(self, row: Row) -> None:
        if not is_list(row["parts"]) or not all(
            is_row(p) and isinstance(p.get("type"), str) for p in row["parts"]
        ):
            self.fail(".parts", "must be a list of parts, each with a type")
        try:
            messages = ui_to_model([self._shared(row)])
        except InvalidValue as error:
            self.fail(error.path.removeprefix("$[0]"), error.reason)
        if row["role"] == "assistant":
            self._ui_rows += 1
            self._open, self._shown = None, row.get("id") or None
        else:
            self._boundary(row)
        self.out.messages.extend(messages)

    # ----------------------------------------------------------------------- helpers

    def _boundary(self, row: Row) -> None:
        """A row that ends the assistant's turn."""
        self._ui_rows += 1
        self._open, self._shown = None, row.get("id") or None
        self._thinking = []

    def _content(self, content: object, empty: str | None) -> str | list[Row] | None:
        if content is None:
            return empty
        if isinstance(content, str):
            return content
        if not is_list(content):
            self.fail(".content", "must be text or a list of parts")
        return collapse_text(self._parts(content)) or empty

    def _parts(self, parts: Sequence[object]) -> list[Row]:
        out: list[Row] = []
        for index, part in enumerate(parts):
            if not is_row(part) or not isinstance(part.get("type"), str):
                self.fail(f".content[{index}]", "must be a part with a type")
            clean = {k: v for k, v in part.items() if v is not None}
            if clean["type"] == "text":
                if "content" not in clean and "text" in clean:
                    clean = {"content" if k == "text" else k: v for k, v in clean.items()}
                if not isinstance(clean.get("content"), str):
                    self.fail(f".content[{index}]", "a text part needs its text")
            elif is_row(clean.get("source")):
                clean["source"] = {k: v for k, v in clean["source"].items() if v is not None}
            out.append(part if clean == part else clean)
        return out

    @staticmethod
    def _structured(value: object) -> Row | None:
        """The structured-output part of a bag; None when it is not one."""
        if not is_row(value) or not isinstance(value.get("raw"), str):
            return None
        if value.get("status") not in _STRUCTURED:
            return None
        rest = {k: v for k, v in value.items() if k != "type" and v is not None}
        return {"type": "structured-output", **rest}
