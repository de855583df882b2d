"""Building events, and bringing any event to the shape that goes on the wire.

Whatever is not a field of the AG-UI event lives in ``metadata.tanstack``; times are integer
epoch milliseconds; an absent field is absent.
"""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from ag_ui.core import (
    CustomEvent,
    EventType,
    Interrupt,
    RunErrorEvent,
    RunFinishedCancelledOutcome,
    RunFinishedEvent,
    RunFinishedInterruptOutcome,
    RunStartedEvent,
    StateSnapshotEvent,
    TokenUsage,
)

from chatkeep.codec import normalize
from chatkeep.engine.middleware import Event

__all__ = [
    "PROTOCOL_VERSION",
    "bag",
    "custom",
    "extras",
    "iso",
    "merge_metadata",
    "new_id",
    "normalized",
    "now_ms",
    "run_error",
    "run_finished",
    "run_interrupted",
    "run_started",
    "state_snapshot",
    "with_changes",
]

PROTOCOL_VERSION: Final = "1.0"

_E = TypeVar("_E", bound=Event)

_NEVER_IN_BAG: Final[dict[EventType, frozenset[str]]] = {
    EventType.TEXT_MESSAGE_CONTENT: frozenset({"model", "content"}),
    EventType.TOOL_CALL_ARGS: frozenset({"model", "args"}),
    EventType.TOOL_CALL_START: frozenset({"toolName"}),
    EventType.TOOL_CALL_END: frozenset({"result"}),
    EventType.RUN_ERROR: frozenset({"error"}),
}


def now_ms() -> int:
    """Epoch milliseconds."""
    return time.time_ns() // 1_000_000


def iso(ms: int) -> str:
    """ISO 8601 text in UTC with milliseconds, as a browser prints it."""
    moment = dt.datetime.fromtimestamp(ms / 1000, tz=dt.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def new_id(prefix: str) -> str:
    """A fresh id, ``<prefix>-<uuid>``."""
    return f"{prefix}-{uuid.uuid4()}"


def with_changes(event: _E, **changes: Any) -> _E:
    """A copy of ``event`` with some attributes changed; the original stays."""
    return event.model_copy(update=changes)


def bag(event: Event) -> dict[str, Any]:
    """``metadata.tanstack`` of an event; empty when there is none. Not to be changed."""
    inner = (event.metadata or {}).get("tanstack")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}


def merge_metadata(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Both, ``right`` winning; the ``tanstack`` bags are merged one level deeper."""
    out = {**left, **right}
    a, b = left.get("tanstack"), right.get("tanstack")
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        out["tanstack"] = {**a, **b}
    return out


def extras(event: Event) -> dict[str, Any]:
    """Keys of ``event`` that AG-UI does not know, by their wire name; empty mostly."""
    return event.__pydantic_extra__ or {}


def normalized(event: Event) -> Event:
    """``event`` with its unknown keys moved to ``metadata.tanstack``; itself if it has none.

    Nulls are dropped on the way. A bag that is there already wins over a key outside it.
    """
    unknown = extras(event)
    if not unknown:
        return event
    dropped = _NEVER_IN_BAG.get(event.type, frozenset())
    moved = {k: v for k, v in unknown.items() if v is not None and k not in dropped}
    kept = {name: getattr(event, name) for name in type(event).model_fields}
    if moved:
        kept["metadata"] = merge_metadata({"tanstack": moved}, event.metadata or {})
    return type(event).model_construct(**kept)


def custom(name: str, value: Any) -> CustomEvent:
    """A CUSTOM event; ``value`` None becomes an empty object, because AG-UI requires one.

    Raises:
        InvalidValue: ``value`` is not JSON.
    """
    return CustomEvent(name=name, value={} if value is None else normalize(value, "$.value"))


def run_started(
    *, thread_id: str, run_id: str, parent_run_id: str | None, model: str
) -> RunStartedEvent:
    """The first event of every run."""
    return RunStartedEvent(
        thread_id=thread_id,
        run_id=run_id,
        parent_run_id=parent_run_id,
        protocol_version=PROTOCOL_VERSION,
        timestamp=now_ms(),
        metadata={"tanstack": {"model": model}} if model else None,
    )


def run_finished(
    *,
    thread_id: str,
    run_id: str,
    usage: list[TokenUsage],
    metadata: dict[str, Any],
    cancelled: bool = False,
) -> RunFinishedEvent:
    """The terminal of a run that ended well, or was stopped."""
    return RunFinishedEvent(
        thread_id=thread_id,
        run_id=run_id,
        outcome=RunFinishedCancelledOutcome() if cancelled else None,
        usage=usage or None,
        timestamp=now_ms(),
        metadata=metadata or None,
    )


def run_interrupted(
    *,
    thread_id: str,
    run_id: str,
    interrupts: Sequence[Mapping[str, Any]],
    usage: list[TokenUsage],
    metadata: dict[str, Any],
) -> RunFinishedEvent:
    """The terminal of a run that pauses, with its interrupts' descriptors."""
    return RunFinishedEvent(
        thread_id=thread_id,
        run_id=run_id,
        outcome=RunFinishedInterruptOutcome(
            interrupts=[Interrupt.model_validate(descriptor) for descriptor in interrupts]
        ),
        usage=usage or None,
        timestamp=now_ms(),
        metadata=metadata or None,
    )


def state_snapshot(state: Any) -> StateSnapshotEvent:
    """The request's state, as it came."""
    return StateSnapshotEvent(snapshot=state)


def run_error(
    *,
    message: str,
    code: str | None,
    usage: list[TokenUsage],
    metadata: dict[str, Any],
    raw_event: Any = None,
) -> RunErrorEvent:
    """The terminal of a run that failed."""
    return RunErrorEvent(
        message=message,
        code=code,
        usage=usage or None,
        timestamp=now_ms(),
        metadata=metadata or None,
        raw_event=raw_event,
    )
