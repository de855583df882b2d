"""What is stored: messages as JSON-shaped dicts, everything else as frozen records.

Messages keep the upstream ModelMessage form (camelCase keys, unknown keys kept), so a
TypeScript server could read the same rows. Records have snake_case attributes and
camelCase JSON names; unknown fields are kept. Times are integer epoch milliseconds.

An optional field that was never set is absent: ``None`` on the attribute, missing in
:meth:`Record.to_json`. Where absent, ``null`` and a value are three states (the response of
an interrupt), absent is :data:`UNSET`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, NotRequired, Required, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer
from pydantic import ValidationError as PydanticValidationError
from pydantic.alias_generators import to_camel
from typing_extensions import TypedDict, TypeIs

from chatkeep.codec import JsonValue, normalize
from chatkeep.errors import CorruptRecord

__all__ = [
    "INTERRUPT_STATUSES",
    "RUN_STATUSES",
    "TERMINAL_RUN_STATUSES",
    "UNSET",
    "ActivityRecord",
    "CutRecord",
    "DraftRecord",
    "InterruptRecord",
    "InterruptStatus",
    "Lease",
    "ModelMessage",
    "Record",
    "RunError",
    "RunPatch",
    "RunRecord",
    "RunStatus",
    "ThreadInfo",
    "ToolCall",
    "ToolCallFunction",
    "Unset",
    "is_run_status",
    "is_set",
    "is_terminal",
]


class Unset(enum.Enum):
    """The type of :data:`UNSET`."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final = Unset.UNSET
"""Absent: a patch leaves the field alone, a record has no such field. ``None`` clears."""


def is_set(value: object) -> bool:
    """Whether ``value`` is anything but :data:`UNSET`."""
    return value is not UNSET


# --------------------------------------------------------------------------- messages


class ToolCallFunction(TypedDict):
    """Name of the tool and its arguments as JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call on an assistant message."""

    id: str
    type: Literal["function"]
    function: ToolCallFunction
    metadata: NotRequired[Any]


class ModelMessage(TypedDict, total=False):
    """One row of a transcript: what the engine and the stores use.

    Only ``role`` is required: no store takes a message without one. ``content`` is text,
    ``None`` (tool calls only) or a list of content parts. ``createdAt`` is ISO 8601 text.
    ``error`` on a tool row decides whether the result is a failure. Keys that are not listed
    here are kept.
    """

    id: str
    role: Required[str]
    content: str | list[dict[str, Any]] | None
    createdAt: str
    name: str
    toolCalls: list[ToolCall]
    toolCallId: str
    thinking: list[dict[str, Any]]
    error: str
    structuredOutput: dict[str, Any]
    metadata: dict[str, Any]


# ---------------------------------------------------------------------------- records

RunStatus = Literal["running", "interrupted", "completed", "failed", "aborted"]
InterruptStatus = Literal["pending", "resolved", "cancelled"]

RUN_STATUSES: Final[frozenset[str]] = frozenset(
    {"running", "interrupted", "completed", "failed", "aborted"}
)
TERMINAL_RUN_STATUSES: Final[frozenset[str]] = frozenset({"completed", "failed", "aborted"})
INTERRUPT_STATUSES: Final[frozenset[str]] = frozenset({"pending", "resolved", "cancelled"})


def is_run_status(value: object) -> TypeIs[RunStatus]:
    """Whether ``value`` is one of the five words a run's status may have."""
    return isinstance(value, str) and value in RUN_STATUSES


def is_terminal(status: str) -> bool:
    """Whether a run with this status has ended (``interrupted`` is parked, not ended)."""
    return status in TERMINAL_RUN_STATUSES


class Record(BaseModel):
    """Base of all records: frozen, unknown fields kept, camelCase in JSON."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        alias_generator=to_camel,
        populate_by_name=True,
        arbitrary_types_allowed=True,
    )

    @model_serializer(mode="wrap")
    def _drop_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        absent = {
            key
            for name, info in type(self).model_fields.items()
            if (value := getattr(self, name)) is UNSET or (value is None and not info.is_required())
            for key in (name, info.alias or name)
            if value is UNSET or name not in self._null_is_a_value()
        }
        return {key: value for key, value in data.items() if key not in absent}

    @classmethod
    def _null_is_a_value(cls) -> frozenset[str]:
        """Fields on which ``None`` is a value of its own, not absence."""
        return frozenset()

    def to_json(self) -> dict[str, Any]:
        """JSON object with camelCase names; absent fields are missing.

        Raises:
            InvalidValue: a field holds what cannot be stored.
        """
        # Not model_dump(): it would convert models and dataclasses inside a value its own way,
        # and a value has one documented form wherever it stands.
        data: dict[str, Any] = {}
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            absent = value is None and not info.is_required()
            if value is UNSET or (absent and name not in self._null_is_a_value()):
                continue
            data[info.alias or name] = value.to_json() if isinstance(value, Record) else value
        plain: dict[str, Any] = normalize({**data, **(self.model_extra or {})}, "$")
        return plain

    @classmethod
    def from_json(cls, value: Mapping[str, Any], what: str = "record") -> Self:
        """The record that :meth:`to_json` came from.

        Raises:
            CorruptRecord: a field is missing or has a value outside its set.
        """
        try:
            return cls.model_validate(value)
        except PydanticValidationError as error:
            raise CorruptRecord(what, str(error)) from error


class RunError(Record):
    """Why a run failed; ``code`` is the stable part to branch on."""

    message: str
    code: str | None = None


class Lease(Record):
    """Who drives a run, and until when by the store's clock."""

    token: str
    until: int


class RunRecord(Record):
    """One execution of :func:`chatkeep.chat`.

    ``finished_at`` stands with a terminal status only. ``cancel_requested`` has three states:
    true, false and absent. ``lease`` absent means the run never expires (runs that users
    drive themselves). ``hide_from`` is the first sequence number that readers hide while this
    run's lease lives (a regenerate in flight).
    """

    run_id: str
    thread_id: str
    status: RunStatus
    started_at: int
    finished_at: int | None = None
    error: RunError | None = None
    usage: dict[str, Any] | None = None
    parent_run_id: str | None = None
    subagent_run_id: str | None = None
    name: str | None = None
    cancel_requested: bool | None = None
    detached_since: int | None = None
    sandbox_key: str | None = None
    driver_epoch: int | None = None
    hide_from: int | None = None
    detached: bool | None = None
    lease: Lease | None = None

    @property
    def terminal(self) -> bool:
        """Whether the run has ended."""
        return is_terminal(self.status)

    def live(self, now: int) -> bool:
        """Whether somebody may be driving the run at ``now`` (the store's clock, ms)."""
        return not self.terminal and (self.lease is None or self.lease.until > now)


class InterruptRecord(Record):
    """One human decision: identity is (thread, run, interrupt id).

    ``claimed_by`` is the run whose start took the answer; readers see it only while that
    run is driven. A claim is no answer: it ends with the run.
    """

    interrupt_id: str
    run_id: str
    thread_id: str
    status: InterruptStatus = "pending"
    requested_at: int
    payload: dict[str, Any]
    resolved_at: int | None = None
    response: JsonValue | Unset = UNSET
    claimed_by: str | None = None

    @classmethod
    def _null_is_a_value(cls) -> frozenset[str]:
        return frozenset({"response"})


class ActivityRecord(Record):
    """One UI row that is no model message.

    Its place is behind the message named by ``anchor``; ``index``, its position among UI rows
    when it was made, decides where there is no anchor (rows of other writers) or its message
    is gone. ``run_id`` is the run that made it.
    """

    id: str
    activity_type: str
    content: dict[str, Any]
    index: int
    metadata: dict[str, Any] | None = None
    subagent_run_id: str | None = None
    anchor: str | None = None
    run_id: str | None = None


class DraftRecord(Record):
    """What a run has streamed so far; overlaid on the transcript by readers."""

    thread_id: str
    run_id: str
    updated_at: int
    messages: list[dict[str, Any]]


class CutRecord(Record):
    """One cut of a thread: what a regenerate, an edit or an overwrite took off its end.

    ``numbers`` are the sequence numbers of the entries, in order; ``message_ids`` their ids
    (``None`` for a message without one); ``extra`` counts messages that a detached run added
    to the cut afterwards.
    """

    cut_id: str
    thread_id: str
    cut_at: int
    run_id: str | None = None
    numbers: list[int]
    message_ids: list[str | None]
    extra: int = 0


class ThreadInfo(Record):
    """A line of a thread list. Times are the store's clock."""

    thread_id: str
    created_at: int
    updated_at: int
    message_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPatch:
    """What to change on a run: a field left :data:`UNSET` stays, ``None`` clears it.

    ``thread_id``, ``started_at`` and the three links are immutable. ``extra`` patches fields
    that chatkeep has no name for.
    """

    status: RunStatus | Unset = UNSET
    finished_at: int | Unset | None = UNSET
    error: RunError | Unset | None = UNSET
    usage: Mapping[str, Any] | Unset | None = UNSET
    cancel_requested: bool | Unset | None = UNSET
    detached_since: int | Unset | None = UNSET
    sandbox_key: str | Unset | None = UNSET
    driver_epoch: int | Unset | None = UNSET
    hide_from: int | Unset | None = UNSET
    detached: bool | Unset | None = UNSET
    lease: Lease | Unset | None = UNSET
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def changes(self) -> dict[str, Any]:
        """The named fields that are set, as given (not ``extra``)."""
        return {
            f.name: value
            for f in fields(self)
            if f.name != "extra" and (value := getattr(self, f.name)) is not UNSET
        }

    def apply(self, run: RunRecord) -> RunRecord:
        """``run`` with this patch; no rule is checked here."""
        data = run.model_dump(by_alias=False)
        for name, value in {**self.changes(), **self.extra}.items():
            if value is None:
                data.pop(name, None)
            else:
                data[name] = value
        return RunRecord.model_validate(data)
