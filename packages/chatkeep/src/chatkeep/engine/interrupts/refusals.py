"""Why a batch of answers was refused, in the form that a browser recognises as its own.

A browser takes the list only if every entry names the thread, the paused run and the generation
of the batch that it sent, and if the entries about the whole batch name the ids that it sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

from chatkeep.errors import InterruptResumeError

__all__ = ["BatchCode", "ItemCode", "Refusal", "Source", "submitted_ids"]

ItemCode: TypeAlias = Literal[
    "invalid-payload",
    "invalid-edited-args",
    "invalid-tool-output",
    "invalid-response-schema",
    "unknown-interrupt",
    "expired",
    "stale",
    "conflict",
]
BatchCode: TypeAlias = Literal[
    "incomplete-batch", "item-validation-failed", "protocol", "stale", "conflict", "server"
]
Source: TypeAlias = Literal["client", "server"]
"""Who is at fault: what was sent, or what is here."""

MAX_ITEMS: Final = 100
"""How many entries a refusal lists: a hostile batch is not answered by ten times its size."""

_LONGEST_NAME: Final = 120
_LONGEST_PATH: Final = 1000


def submitted_ids(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The interrupt ids that a batch names, in its order, duplicates included."""
    ids = (
        cast("Mapping[str, Any]", entry).get("interruptId")
        for entry in cast("Sequence[object]", entries)
        if isinstance(entry, Mapping)
    )
    return [name for name in ids if isinstance(name, str)]


def named(interrupt_id: str) -> str:
    """An id as messages show it: a long one is cut."""
    return (
        interrupt_id
        if len(interrupt_id) <= _LONGEST_NAME
        else f"{interrupt_id[: _LONGEST_NAME - 1]}…"
    )


class Refusal:
    """Collects what is wrong with one batch of answers.

    ``interrupted_run_id`` is the paused run as the request named it (its ``parentRunId``), or the
    one that waits where it named none; ``submitted`` are the ids of its entries.
    """

    def __init__(
        self, thread_id: str, interrupted_run_id: str, submitted: Sequence[str] = ()
    ) -> None:
        self._common = {
            "threadId": thread_id,
            "interruptedRunId": interrupted_run_id,
            "generation": 0,
        }
        self._submitted = list(submitted)
        self._items: list[dict[str, Any]] = []
        self._batch: dict[str, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._items or self._batch)

    @property
    def items(self) -> int:
        """How many entries are refused."""
        return len(self._items)

    def item(
        self,
        interrupt_id: str,
        code: ItemCode,
        message: str,
        *,
        source: Source = "client",
        path: Sequence[str | int] = (),
    ) -> Refusal:
        """One interrupt whose answer is refused; ``path`` leads into what was answered (and is
        left out where it is too long to be read)."""
        error: dict[str, Any] = {
            "scope": "item",
            "code": code,
            "message": message,
            "source": source,
            "retryable": False,
            "interruptId": interrupt_id,
            **self._common,
        }
        if path and sum(len(str(step)) + 1 for step in path) <= _LONGEST_PATH:
            error["path"] = list(path)
        self._items.append(error)
        return self

    def batch(self, code: BatchCode, message: str, *, source: Source = "client") -> Refusal:
        """The batch as a whole is refused; each code is listed once."""
        self._batch.setdefault(
            code,
            {
                "scope": "batch",
                "code": code,
                "message": message,
                "source": source,
                "retryable": False,
                "interruptIds": self._submitted,
                **self._common,
            },
        )
        return self

    def error(self) -> InterruptResumeError:
        """The error to raise: items by interrupt id, then the batch."""
        items = sorted(self._items, key=lambda item: cast("str", item["interruptId"]))
        return InterruptResumeError([*items[:MAX_ITEMS], *self._batch.values()])

    def check(self) -> None:
        """Raise when something was collected.

        Raises:
            InterruptResumeError: what was collected.
        """
        if self:
            raise self.error()
