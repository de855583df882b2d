"""What a process knows of transcripts it has seen, so that saving one again costs little.

A plain ``save_thread`` gets the whole list although mostly its end is new. Remembered per
thread are a revision and fingerprints of the list at that revision, never the messages: a
list that still has the fingerprints is the stored one, whoever changed or copied its
objects, and what follows can be spliced on without reading anything. The revision in the
commit is the judge; a wrong memory costs a round trip.

A fingerprint is Python's keyed 64-bit hash of the JSON of a stretch of messages: one call in
C each, several times cheaper than a digest per message. It is taken of lists that are stored
or about to be, so it stands for storable values. The one change it does not see is a stored
null that became NaN, which cannot be stored: the null stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import orjson

from chatkeep.records import ModelMessage
from chatkeep.scope import Scope

__all__ = ["Fingerprints", "Known", "json_of", "known_list", "top_level_nones"]

_Key: TypeAlias = tuple[Scope, str]

_STRICT = (
    orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)
_THREADS = 4096
_STRETCHES = 32


def json_of(value: Any) -> bytes | None:
    """What the codec writes for ``value``, without its walk in Python; None where orjson alone
    cannot be trusted with it (NaN becomes null: see :func:`top_level_nones`)."""
    try:
        return orjson.dumps(value, option=_STRICT)
    except (TypeError, RecursionError):
        return None


def top_level_nones(message: Any) -> int:
    """How many values of a message are None; -1 for what is no plain object.

    Where a body has more nulls than that, one of them may have been a NaN.
    """
    if not isinstance(message, dict):
        return -1
    return sum(value is None for value in cast("dict[str, Any]", message).values())


@dataclass(frozen=True, slots=True)
class Known:
    """The list at ``revision``: how many messages, the number of the last, and one
    fingerprint for each stretch, with the index where it ends."""

    revision: str
    newest: int
    stretches: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many messages the list has."""
        return self.stretches[-1][0] if self.stretches else 0

    def starts(self, messages: Sequence[ModelMessage]) -> bool:
        """Whether ``messages`` begin with this list, by content."""
        if len(messages) < self.count:
            return False
        begin = 0
        for end, print_ in self.stretches:
            if _fingerprint(messages[begin:end]) != print_:
                return False
            begin = end
        return True

    def grown(self, messages: Sequence[ModelMessage], revision: str, newest: int) -> Known | None:
        """The same with what ``messages`` have after it; None if that has no fingerprint."""
        if len(self.stretches) >= _STRETCHES:
            return known_list(messages, revision, newest)
        print_ = _fingerprint(messages[self.count :])
        if print_ is None:
            return None
        return Known(revision, newest, (*self.stretches, (len(messages), print_)))


def known_list(messages: Sequence[ModelMessage], revision: str, newest: int) -> Known | None:
    """What to remember of a whole list; None if it has no fingerprint."""
    print_ = _fingerprint(messages)
    return None if print_ is None else Known(revision, newest, ((len(messages), print_),))


def _fingerprint(messages: Sequence[ModelMessage]) -> int | None:
    body = json_of(messages)
    return None if body is None else hash(body)


class Fingerprints:
    """The memory of one backend: the threads seen last, some hundred bytes each."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: OrderedDict[_Key, Known] = OrderedDict()

    def get(self, scope: Scope, thread_id: str) -> Known | None:
        """What is remembered of a thread."""
        return self._known.get((scope, thread_id))

    def put(self, scope: Scope, thread_id: str, known: Known | None) -> None:
        """Remember, or forget (None)."""
        key = (scope, thread_id)
        self._known.pop(key, None)
        if known is None or not known.revision:
            return
        self._known[key] = known
        if len(self._known) > _THREADS:
            self._known.popitem(last=False)
