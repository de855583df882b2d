"""Names of keys. Everything of one thread carries one hash tag, so that a cluster keeps it in one
slot and a script may touch it all.

A tag is made of percent-encoded parts: no id can close it, and no two ids share one. The same text,
without the braces, is the thread's place in the indexes.

===================================== =========================================================
``{t/<tenant>/<user>/<thread>}:…``    a thread, under the names of :data:`THREAD_KEYS`
``{r/<tenant>/<user>/<run>}``         which thread a run id belongs to
``{p/<tenant>/<user>/<run>}``         the children of a run
``{i/<tenant>/<user>}:…``             indexes of one scope: threads, subagents, detached
``{i/…}``                             indexes over all scopes: idle, lost, cuts, detached, logs
``{l/<digest>}:…``                    the delivery log of a run: head, events
``{l/t/<tenant>/<user>/<thread>}``    the delivery logs of a thread
``{k/<digest>}``                      a lock
===================================== =========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from chatkeep.errors import CompositionError, CorruptRecord
from chatkeep.rules import is_child_thread
from chatkeep.scope import Scope

__all__ = [
    "THREAD_KEYS",
    "Keys",
    "check_prefix",
    "place_of_cut",
    "place_of_run",
    "place_of_thread",
    "read_place",
]

THREAD_KEYS = (
    "head",
    "body",
    "info",
    "open",
    "ended",
    "asked",
    "settled",
    "rows",
    "drafts",
    "cuts",
    "values",
    "gone",
)
"""The keys of one thread, in the order in which every script takes them."""


def check_prefix(prefix: object) -> str:
    """Refuse a prefix that would change where keys go.

    Raises:
        CompositionError: no text, empty, or with a brace (which begins or ends a hash tag).
    """
    if not isinstance(prefix, str) or not prefix:
        raise CompositionError("the prefix of keys is text, and not empty")
    if "{" in prefix or "}" in prefix:
        raise CompositionError("the prefix of keys must not contain braces: they are hash tags")
    return prefix


def _quote(part: str) -> str:
    return quote(part, safe="")


def place_of_thread(scope: Scope, thread_id: str) -> str:
    """A thread in an index."""
    tenant, user = scope.key
    return f"t/{_quote(tenant)}/{_quote(user)}/{_quote(thread_id)}"


def place_of_run(thread: str, run_id: str) -> str:
    """A run in an index; ``thread`` is the place of its thread."""
    return f"{thread}/{_quote(run_id)}"


def place_of_cut(thread: str, mark: str) -> str:
    """A cut in an index; ``mark`` is that of the commit that made it."""
    return f"{thread}/{mark}"


def read_place(place: bytes) -> tuple[Scope, str, list[str]]:
    """Scope and thread id of a place, and what follows them.

    Raises:
        CorruptRecord: none of the texts above.
    """
    kind, *parts = place.decode(errors="replace").split("/")
    if kind != "t" or len(parts) < 3:
        raise CorruptRecord("an index", f"{place!r} names no thread")
    tenant, user, thread_id, *rest = map(unquote, parts)
    return Scope.from_key(tenant, user), thread_id, rest


@dataclass(frozen=True, slots=True)
class Keys:
    """The names under one prefix."""

    prefix: str

    def thread(self, place: str) -> list[bytes]:
        """The keys of a thread, see :data:`THREAD_KEYS`."""
        base = f"{self.prefix}:{{{place}}}:"
        return [(base + name).encode() for name in THREAD_KEYS]

    def owner(self, scope: Scope, run_id: str) -> bytes:
        """The look-up of a run."""
        return self._of_run("r", scope, run_id)

    def children(self, scope: Scope, run_id: str) -> bytes:
        """The look-up of a run's children."""
        return self._of_run("p", scope, run_id)

    def _of_run(self, kind: str, scope: Scope, run_id: str) -> bytes:
        tenant, user = scope.key
        tag = f"{kind}/{_quote(tenant)}/{_quote(user)}/{_quote(run_id)}"
        return f"{self.prefix}:{{{tag}}}".encode()

    def threads(self, scope: Scope, thread_id: str) -> bytes:
        """The index of a scope that lists this thread."""
        return self.threads_of(scope, children=is_child_thread(thread_id))

    def threads_of(self, scope: Scope, *, children: bool) -> bytes:
        """The threads of a scope, by the time of their last write."""
        return self._of_scope(scope, "subagents" if children else "threads")

    def detached(self, scope: Scope | None) -> bytes:
        """Running runs that nobody watches, by when they were left; of one scope or of all."""
        return self._global("detached") if scope is None else self._of_scope(scope, "detached")

    def _of_scope(self, scope: Scope, name: str) -> bytes:
        tenant, user = scope.key
        return f"{self.prefix}:{{i/{_quote(tenant)}/{_quote(user)}}}:{name}".encode()

    @property
    def idle(self) -> bytes:
        """Threads of every scope by the time of their last write, subagents' left out."""
        return self._global("idle")

    @property
    def lost(self) -> bytes:
        """Running runs of every scope by the end of their lease."""
        return self._global("lost")

    @property
    def cuts(self) -> bytes:
        """Cuts of every scope by when they were made."""
        return self._global("cuts")

    def log(self, digest: bytes) -> list[bytes]:
        """Head and events of a delivery log."""
        base = f"{self.prefix}:{{l/{digest.hex()}}}:"
        return [(base + name).encode() for name in ("head", "events")]

    def logs_of(self, place: str) -> bytes:
        """The delivery logs of a thread."""
        return f"{self.prefix}:{{l/{place}}}".encode()

    @property
    def open_logs(self) -> bytes:
        """Delivery logs of every scope that are written."""
        return self._global("logs")

    @property
    def closed_logs(self) -> bytes:
        """Delivery logs of every scope by when they were closed."""
        return self._global("closed")

    @property
    def log_channel(self) -> str:
        """Where it is published that a delivery log has changed."""
        return f"{self.prefix}:log"

    def lock(self, digest: bytes) -> bytes:
        """A lock."""
        return f"{self.prefix}:{{k/{digest.hex()}}}".encode()

    @property
    def ping(self) -> bytes:
        """Any key: where a ping goes."""
        return self._global("ping")

    def _global(self, name: str) -> bytes:
        return f"{self.prefix}:{{i/{name}}}".encode()
