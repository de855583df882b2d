"""A tool call of a model: its arguments, and the row and event of its result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from ag_ui.core import ToolCallResultEvent

from chatkeep.codec import normalize
from chatkeep.engine.events import iso, now_ms
from chatkeep.engine.text import Text
from chatkeep.messages.parts import bag_of
from chatkeep.records import ModelMessage

__all__ = ["Call", "ResultOutcome", "compact", "is_content_parts", "parse_json", "result_content"]

ResultOutcome = Literal["denied", "cancelled"]
"""Why a call has a failed result without having been executed."""

_MEDIA: Final = frozenset({"image", "audio", "video", "document"})


def compact(value: Any) -> str:
    """JSON text without spaces, characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_json(text: str) -> Any:
    """The JSON value of ``text``.

    Raises:
        ValueError: it is no JSON (``NaN`` is none either), or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def is_content_parts(value: Any) -> bool:
    """Whether ``value`` is a non-empty list of content parts (text or media)."""
    if not isinstance(value, list) or not value:
        return False
    return all(_is_part(part) for part in cast("Sequence[Any]", value))


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    row = cast("dict[str, Any]", part)
    if row.get("type") == "text":
        return isinstance(row.get("content"), str)
    if row.get("type") not in _MEDIA or not isinstance(row.get("source"), dict):
        return False
    source = cast("dict[str, Any]", row["source"])
    if not isinstance(source.get("value"), str):
        return False
    if source.get("type") == "data":
        return isinstance(source.get("mimeType"), str)
    return source.get("type") == "url"


def result_content(value: Any) -> tuple[Any, str | list[dict[str, Any]]]:
    """A tool's return value: what hooks see, and the content of its row.

    Text stays as it is in the row, and is JSON-parsed for hooks when it parses. A list of
    content parts stays a list. Anything else becomes JSON text; None becomes ``null``.

    Raises:
        InvalidValue: it cannot be written as JSON.
    """
    plain = normalize(value, "result")
    if isinstance(plain, str):
        try:
            return parse_json(plain), plain
        except ValueError:
            return plain, plain
    if is_content_parts(plain):
        return plain, plain
    return plain, compact(plain)


class Call:
    """One tool call of a turn."""

    __slots__ = ("answered", "arguments", "identity", "metadata", "name", "open", "streamed")

    def __init__(self, identity: str, name: str, metadata: dict[str, Any] | None = None) -> None:
        self.identity = identity
        self.name = name
        self.metadata = metadata
        self.arguments = Text()
        self.open = True
        self.streamed = False
        self.answered = False
        """Whether the provider gave the result itself."""

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> Call:
        """The call of an assistant row, as :meth:`entry` wrote it."""
        function = cast("Mapping[str, Any]", entry.get("function") or {})
        call = cls(entry["id"], str(function.get("name", "")), entry.get("metadata"))
        call.arguments.replace(str(function.get("arguments") or ""))
        call.open = False
        return call

    @property
    def text(self) -> str:
        """The arguments as the model wrote them."""
        return str(self.arguments)

    @property
    def provider_executed(self) -> bool:
        """Whether the provider runs this call."""
        return bool((self.metadata or {}).get("providerExecuted"))

    @property
    def waiting(self) -> bool:
        """Whether the call needs a result from here."""
        return not (self.provider_executed or self.answered)

    def use_input(self, value: Any) -> None:
        """Parsed arguments that the adapter gives at the end; they win over streamed text that
        says something else. What is no object becomes one, empty."""
        plain = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        try:
            if self.text and parse_json(self.text) == plain:
                return
        except ValueError:
            pass  # the streamed text is broken; the parsed input replaces it
        self.arguments.replace(compact(plain))

    def parse(self) -> Any:
        """The arguments: blank text and JSON scalars become ``{}``, lists stay.

        Raises:
            ValueError: they are no JSON.
        """
        if not self.text.strip():
            return {}
        value = parse_json(self.text)
        return cast("Any", value) if isinstance(value, dict | list) else {}

    def parsed_object(self) -> dict[str, Any] | None:
        """The arguments if they are a JSON object."""
        try:
            value = self.parse()
        except ValueError:
            return None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else None

    def entry(self) -> dict[str, Any]:
        """The call on the assistant row. Arguments that were never sent are ``{}``."""
        out: dict[str, Any] = {
            "id": self.identity,
            "type": "function",
            "function": {"name": self.name, "arguments": self.text or "{}"},
        }
        if self.metadata:
            out["metadata"] = self.metadata
        return out

    def result_row(
        self, value: Any, *, identity: str, failed: bool, outcome: ResultOutcome | None = None
    ) -> ModelMessage:
        """The tool row of a result, under its own id. ``outcome``: nothing was executed.

        Raises:
            InvalidValue: ``value`` cannot be written as JSON.
        """
        seen, content = result_content(value)
        row: ModelMessage = {
            "role": "tool",
            "content": content,
            "toolCallId": self.identity,
            "id": identity,
            "createdAt": iso(now_ms()),
        }
        if failed:
            # An empty text would read as no error in a browser.
            row["error"] = _error_text(seen) or "failed"
        if outcome is not None:
            row["metadata"] = {"tanstack": {"toolResultOutcome": outcome}}
        return row

    def result_event(self, row: ModelMessage) -> ToolCallResultEvent:
        """The TOOL_CALL_RESULT of a tool row; only failures carry a state, and say
        when somebody decided that."""
        content = row.get("content")
        marks: dict[str, Any] = {"state": "output-error"} if "error" in row else {}
        outcome = bag_of(row).get("toolResultOutcome")
        if outcome is not None:
            marks["toolResultOutcome"] = outcome
        return ToolCallResultEvent(
            message_id=row.get("id", self.identity),
            tool_call_id=self.identity,
            content=content if isinstance(content, str) else compact(content),
            role="tool",
            metadata={"tanstack": marks} if marks else None,
        )


def _error_text(seen: Any) -> str:
    """What a browser shows of a failed result: its error, its text, or that it failed."""
    if isinstance(seen, dict):
        error: Any = cast("dict[str, Any]", seen).get("error")
        if isinstance(error, str) and error:
            return error
    return seen if isinstance(seen, str) else "Tool execution failed"
