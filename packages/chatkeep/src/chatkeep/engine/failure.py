"""What an exception looks like on the wire and in a run record."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, Final, cast

from chatkeep.codec import normalize
from chatkeep.engine.text import whole_text
from chatkeep.errors import (
    ChatkeepError,
    InterruptResumeError,
    InvalidValue,
    ProviderError,
    StoreError,
    StructuredOutputError,
)

__all__ = ["Failure", "error_text", "failure_of", "is_foreign", "log_raised"]

_LOG: Final = logging.getLogger("chatkeep.engine")

_ABORT_SHAPED: Final = frozenset({"AbortError", "APIUserAbortError", "RequestAbortedError"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """``message`` and ``code`` of a RUN_ERROR; ``details`` go to ``metadata.tanstack``."""

    message: str
    code: str | None
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    raw_event: Any = None


def failure_of(error: BaseException) -> Failure:
    """Map an exception.

    The code is the error's ``code`` (text, or a finite number), else its numeric ``status`` or
    ``status_code``. An error that says that a request was aborted, by its class name, has code
    ``aborted``. A store's failure is logged; browsers are told of no hosts, tables or rows. A
    group stands for its first error. Text that is no Unicode text (half a surrogate pair, as
    servers that cut strings send them) is mended, so that every encoder can write the event.
    """
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return failure_of(group.exceptions[0])
    if any(kind.__name__ in _ABORT_SHAPED for kind in type(error).__mro__):
        return Failure(message="request aborted", code="aborted")
    message = error_text(error)
    if isinstance(error, InterruptResumeError):
        return Failure(message=message, code=whole_text(error.first_code), details=_items(error))
    if isinstance(error, ProviderError):
        code = error.provider_code and whole_text(error.provider_code)
        return Failure(message=message, code=code, raw_event=error.raw_event)
    if isinstance(error, StructuredOutputError):
        return Failure(message=message, code=error.full_code)
    if isinstance(error, StoreError) and error.public is not None:
        _LOG.error("a store failed a run: %s", error, exc_info=error)
        return Failure(message=error.public, code=error.code)
    if isinstance(error, ChatkeepError):
        return Failure(message=message, code=error.code)
    return Failure(message=message, code=_code(error))


def log_raised(
    level: int, error: BaseException, what: str, *args: object, run_id: str, thread_id: str
) -> None:
    """Log what code of an application raised, with its traceback: on the wire stands its text
    only. ``what`` (with ``args``) says where it came from. A store's failure is left out, since
    :func:`failure_of` has logged it."""
    if not (isinstance(error, StoreError) and error.public is not None):
        said = f"{what} (run %r of thread %r)"
        _LOG.log(level, said, *args, run_id, thread_id, exc_info=error)


def is_foreign(error: BaseException) -> bool:
    """Whether it is an exception of other code than chatkeep's: nobody has told of it yet."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return any(is_foreign(one) for one in group.exceptions)
    return not isinstance(error, ChatkeepError)


def error_text(error: BaseException) -> str:
    """What an exception says; its class where it says nothing, or cannot."""
    try:
        text = whole_text(str(error))
    except Exception:  # noqa: BLE001 - an error whose text raises is still the one to report
        text = ""
    return text or type(error).__name__


def _items(error: InterruptResumeError) -> dict[str, Any]:
    try:
        return {"interruptErrors": normalize(list(error.errors))}
    except InvalidValue:  # raised by a middleware, with what is no JSON: the message says it
        return {}


def _code(error: BaseException) -> str | None:
    code = getattr(error, "code", None)
    if isinstance(code, str) and code:
        return whole_text(code)
    for value in (code, getattr(error, "status", None), getattr(error, "status_code", None)):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return str(value)
    return None
