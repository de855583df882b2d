"""Generic interrupts: questions of the application, defined once and asked by middleware."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeAlias, cast

import pydantic
from pydantic import TypeAdapter

from chatkeep.codec import normalize
from chatkeep.engine.interrupts.canonical import schema_hash
from chatkeep.engine.schema import Problem, SchemaValidator, pydantic_issue
from chatkeep.errors import InvalidValue, ToolError
from chatkeep.records import UNSET, Unset

__all__ = [
    "InterruptDefinition",
    "InterruptRequest",
    "define_interrupt",
    "definitions_by_id",
    "iso_ms",
]

SchemaSource: TypeAlias = Any
"""A JSON Schema, a type that pydantic can describe by one, or None."""


@dataclass(frozen=True, slots=True)
class InterruptDefinition:
    """A question that may be asked. Make it with :func:`define_interrupt`.

    ``response_schema`` and ``payload_schema`` are JSON Schemas; None: anything goes.
    """

    id: str
    _: KW_ONLY
    response_schema: dict[str, Any] | None = None
    payload_schema: dict[str, Any] | None = None
    _response: SchemaValidator | None = field(default=None, repr=False)
    _payload: SchemaValidator | None = field(default=None, repr=False)
    _response_type: TypeAdapter[Any] | None = field(default=None, repr=False)
    _payload_type: TypeAdapter[Any] | None = field(default=None, repr=False)

    @property
    def response_hash(self) -> str | None:
        """Hash of the response schema; None without one."""
        return None if self.response_schema is None else schema_hash(self.response_schema)

    @property
    def payload_hash(self) -> str | None:
        """Hash of the payload schema; None without one."""
        return None if self.payload_schema is None else schema_hash(self.payload_schema)

    def request(
        self,
        *,
        key: str,
        reason: str,
        message: str,
        payload: Any = UNSET,
        expires_at: dt.datetime | int | str | None = None,
    ) -> InterruptRequest:
        """A question to return from ``on_interrupt_boundary``.

        ``key`` tells questions of one definition apart. ``reason`` is a word for programs,
        ``message`` a sentence for people. ``payload`` is what is shown; UNSET: nothing.
        A definition made with a type shows, and keeps, what the type makes of it.
        ``expires_at`` (a datetime with a time zone, epoch milliseconds, or ISO 8601 text): no
        answer but a cancellation is taken from then on.

        Raises:
            InvalidValue: a text that is empty, a payload that does not fit its schema, or a
                time that is none; ``path`` names the argument.
        """
        for path, text in (("$.key", key), ("$.reason", reason), ("$.message", message)):
            given: object = text
            if not isinstance(given, str) or not given:
                raise InvalidValue(path, "must be text that is not empty")
        return InterruptRequest(
            definition=self,
            key=cast("str", normalize(key)),
            reason=cast("str", normalize(reason)),
            message=cast("str", normalize(message)),
            payload=self._shown(self._parsed(payload)),
            expires_at=None if expires_at is None else _iso(expires_at),
        )

    def repeat(
        self, *, key: str, reason: str, message: str, payload: Any, expires_at: str | None
    ) -> InterruptRequest:
        """The question as it was asked: ``payload`` is what was shown, so the type that it was
        given in has been applied, and is not applied again.

        Raises:
            InvalidValue: as :meth:`request`.
        """
        asked = InterruptDefinition(
            self.id, payload_schema=self.payload_schema, _payload=self._payload
        ).request(key=key, reason=reason, message=message, payload=payload, expires_at=expires_at)
        return replace(asked, definition=self)

    def _parsed(self, payload: Any) -> Any:
        if payload is UNSET or self._payload_type is None:
            return payload
        try:
            return self._payload_type.validate_python(payload)
        except pydantic.ValidationError as error:
            raise InvalidValue("$.payload", pydantic_issue(error)) from error

    def _shown(self, payload: Any) -> Any:
        if payload is UNSET:
            if self.payload_schema is not None:
                raise InvalidValue("$.payload", f"interrupt {self.id} is shown with a payload")
            return UNSET
        plain = normalize(payload, "$.payload")
        problem = self.payload_problem(plain)
        if problem is not None:
            raise InvalidValue("$.payload", str(problem))
        return plain

    def payload_problem(self, payload: Any) -> Problem | None:
        """What is wrong with what is shown, held against its schema; None when it fits. The rules
        of a type count once, when the question is asked: they may depend on the moment, or take
        another form than they make."""
        return _problem(self._payload, None, payload)

    def response_problem(self, response: Any) -> Problem | None:
        """What is wrong with an answer, and where; None when it fits."""
        return _problem(self._response, self._response_type, response)

    def parse(self, response: Any) -> Any:
        """An answer as the type that the definition was made with; JSON as it is otherwise.

        Raises:
            pydantic.ValidationError: it does not fit. Answers that the engine hands out do.
        """
        return (
            response
            if self._response_type is None
            else self._response_type.validate_python(response)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptRequest:
    """One question to ask. Make it with :meth:`InterruptDefinition.request`.

    ``payload`` is JSON, or UNSET; ``expires_at`` ISO 8601 text, or None.
    """

    definition: InterruptDefinition
    key: str
    reason: str
    message: str
    payload: Any | Unset = UNSET
    expires_at: str | None = None


def define_interrupt(
    id: str,  # noqa: A002 - the field's own word
    *,
    response: SchemaSource = None,
    payload: SchemaSource = None,
) -> InterruptDefinition:
    """Define a generic interrupt.

    ``id`` is the name that the browser's definition has too. ``response`` describes the answer,
    ``payload`` what is shown with the question: each a JSON Schema, which is hashed as it is (so
    a browser with the same one knows the interrupt), or a type that pydantic can describe (a
    model, a dataclass, a TypedDict, a Literal, …), whose JSON Schema is taken.

    Raises:
        ToolError: no id, or a schema that is not valid.
    """
    given: object = id
    if not isinstance(given, str) or not given:
        raise ToolError("an interrupt definition needs an id that is not empty")
    response_schema, response_type = _schema_of(response, f"response of interrupt {id}")
    payload_schema, payload_type = _schema_of(payload, f"payload of interrupt {id}")
    return InterruptDefinition(
        id,
        response_schema=response_schema,
        payload_schema=payload_schema,
        _response=_validator(response_schema, f"response of interrupt {id}"),
        _payload=_validator(payload_schema, f"payload of interrupt {id}"),
        _response_type=response_type,
        _payload_type=payload_type,
    )


def definitions_by_id(definitions: Sequence[InterruptDefinition]) -> dict[str, InterruptDefinition]:
    """Definitions by id.

    Raises:
        ToolError: two have the same id, or an entry is none.
    """
    out: dict[str, InterruptDefinition] = {}
    for item in definitions:
        given: object = item
        if not isinstance(given, InterruptDefinition):
            raise ToolError(f"not an interrupt definition: {given!r}; use define_interrupt")
        if item.id in out:
            raise ToolError(f"two interrupt definitions are called {item.id!r}")
        out[item.id] = item
    return out


def iso_ms(text: str) -> int | None:
    """Epoch milliseconds of ISO 8601 text; None when it is none. Without an offset: UTC."""
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return int(moment.timestamp() * 1000)


def _iso(moment: dt.datetime | int | str) -> str:
    if isinstance(moment, str):
        if iso_ms(moment) is None:
            raise InvalidValue("$.expires_at", f"{moment!r} is no ISO 8601 time")
        return moment
    if isinstance(moment, dt.datetime):
        if moment.tzinfo is None:
            raise InvalidValue("$.expires_at", "a datetime needs a time zone")
        return _utc(moment)
    if isinstance(moment, bool) or not isinstance(cast("object", moment), int):
        raise InvalidValue("$.expires_at", "must be a datetime, epoch milliseconds or text")
    try:
        return _utc(dt.datetime.fromtimestamp(moment / 1000, dt.UTC))
    except (OverflowError, ValueError, OSError) as error:
        raise InvalidValue("$.expires_at", f"{moment} is no epoch time in milliseconds") from error


def _utc(moment: dt.datetime) -> str:
    text = moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _schema_of(
    source: SchemaSource, what: str
) -> tuple[dict[str, Any] | None, TypeAdapter[Any] | None]:
    if source is None:
        return None, None
    if isinstance(source, Mapping):
        return dict(cast("Mapping[str, Any]", source)), None
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(source)
        return adapter.json_schema(), adapter
    except (pydantic.errors.PydanticUserError, TypeError, NameError) as error:
        raise ToolError(f"{what}: no JSON Schema for {source!r}: {error}") from error


def _validator(schema: dict[str, Any] | None, what: str) -> SchemaValidator | None:
    return None if schema is None else SchemaValidator(schema, what)


def _problem(
    validator: SchemaValidator | None, adapter: TypeAdapter[Any] | None, value: Any
) -> Problem | None:
    problem = None if validator is None else validator.problem(value)
    if problem is not None or adapter is None:
        return problem
    try:
        adapter.validate_python(value)
    except pydantic.ValidationError as error:
        return Problem(pydantic_issue(error), error.errors(include_url=False)[0]["loc"])
    return None
