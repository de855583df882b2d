"""What every backend refuses, before a driver sees it.

Databases differ in what they take: one has no NUL, another no half characters, a third no
integers beyond 64 bits. What reaches a primitive is what all of them take.
"""

from __future__ import annotations

from typing import Final

from chatkeep.errors import CompositionError, InterruptConflict, InvalidValue
from chatkeep.records import UNSET, InterruptRecord, Lease, RunPatch
from chatkeep.scope import Scope, check_id
from chatkeep.stores import RunStart, TurnCommit, ViewQuery

__all__ = [
    "MAX_INTEGER",
    "check_commit",
    "check_integer",
    "check_limit",
    "check_metadata_key",
    "check_query",
    "check_revision",
    "check_scope",
    "check_token",
]

MAX_INTEGER: Final = 2**53 - 1
"""Greatest time, number or duration: what every database and every JSON reader keeps exactly."""


def check_integer(value: object, what: str) -> None:
    """Refuse what is no integer of 53 bits (times are epoch milliseconds).

    Raises:
        InvalidValue: names ``what``.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidValue(what, f"must be an integer, not {type(value).__name__}")
    if not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise InvalidValue(what, "must be an integer of at most 53 bits")


def check_limit(limit: int) -> None:
    """Refuse a page without a place.

    Raises:
        InvalidValue: below 1, or no integer.
    """
    check_integer(limit, "limit")
    if limit < 1:
        raise InvalidValue("limit", "must be at least 1")


def check_scope(scope: object) -> None:
    """Refuse what is no scope before it is in a key: rows under it would be nobody's.

    Raises:
        CompositionError: says what it is instead.
    """
    if not isinstance(scope, Scope):
        raise CompositionError(f"a scope is a Scope(…), not {type(scope).__name__}")


def check_token(value: str | None, what: str) -> None:
    """A lease token follows the rules of ids.

    Raises:
        InvalidValue: names ``what``.
    """
    if value is not None:
        check_id(value, what)


def check_revision(value: str | None, what: str) -> None:
    """A revision or cut id is text of ours, or the empty text; anything storable may be asked.

    Raises:
        InvalidValue: it is no text, or text that no database takes.
    """
    if value:
        check_id(value, what)


def check_metadata_key(namespace: str, key: str) -> None:
    """A namespace is an id; a key is one or empty: the pair is the identity.

    Raises:
        InvalidValue: names which is wrong.
    """
    check_id(namespace, "namespace")
    if key != "":
        check_id(key, "key")


def check_query(query: ViewQuery) -> None:
    """What a read may ask.

    Raises:
        InvalidValue: names the field.
    """
    if query.run_id is not None:
        check_id(query.run_id, "run_id")
    if query.limit is not None:
        check_limit(query.limit)
    if query.before is not None:
        check_integer(query.before, "before")


def check_commit(commit: TurnCommit) -> None:
    """A commit that means something, in values that can be stored.

    Raises:
        InvalidValue: names the part.
        InterruptConflict: one interrupt is answered twice.
    """
    check_id(commit.commit_id, "commit_id")
    check_id(commit.thread_id, "thread_id")
    check_token(commit.lease_token, "commit.lease_token")
    if commit.run_id is not None:
        check_id(commit.run_id, "run_id")
    elif isinstance(commit.run, RunPatch):
        raise InvalidValue("commit.run_id", "a run patch needs the run's id")
    elif commit.claims:
        raise InvalidValue("commit.run_id", "claims are taken for a run")
    elif commit.lease_token is not None:
        raise InvalidValue("commit.run_id", "a lease token needs the run's id")
    if commit.lease_expired and commit.lease_token is None:
        raise InvalidValue("commit.lease_token", "an expired lease is named by its token")
    if isinstance(commit.run, RunStart):
        _check_start(commit.run, commit.run_id)
    elif commit.run is not None:
        _check_patch(commit.run)
    _check_transcript(commit)
    _check_interrupts(commit)


def _check_start(start: RunStart, run_id: str | None) -> None:
    check_id(start.run_id, "run_id")
    if run_id not in (None, start.run_id):
        raise InvalidValue("commit.run_id", "is not the run that the commit starts")
    for name in ("parent_run_id", "subagent_run_id", "name"):
        link = getattr(start, name)
        if link is not None:
            check_id(link, name)
    check_token(start.lease_token, "lease_token")
    check_integer(start.started_at, "started_at")
    check_integer(start.lease_ms, "lease_ms")
    if start.hide_from is not None:
        check_integer(start.hide_from, "hide_from")


def _check_patch(patch: RunPatch) -> None:
    for name in ("finished_at", "detached_since", "driver_epoch", "hide_from"):
        value = getattr(patch, name)
        if value is not None and value is not UNSET:
            check_integer(value, name)
    if isinstance(patch.lease, Lease):
        check_token(patch.lease.token, "lease.token")
        check_integer(patch.lease.until, "lease.until")


def _check_transcript(commit: TurnCommit) -> None:
    splice = commit.splice
    if splice is not None:
        check_integer(splice.keep_through, "splice.keep_through")
        if splice.keep_through < 0:
            raise InvalidValue("splice.keep_through", "must not be negative")
        check_revision(splice.expected, "splice.expected")
        if commit.restore is not None:
            raise InvalidValue("commit.restore", "cannot stand beside a splice")
    if commit.restore is not None and commit.cut_append is not None:
        raise InvalidValue("commit.restore", "cannot stand beside a cut append")
    check_revision(commit.restore, "commit.restore")
    check_revision(commit.restore_expected, "commit.restore_expected")
    if commit.cut_append is not None:
        check_revision(commit.cut_append.cut_id, "cut_append.cut_id")


def _check_interrupts(commit: TurnCommit) -> None:
    seen: set[tuple[str, str]] = set()
    for record in commit.interrupts:
        _check_record(record, commit.thread_id)
        _once(seen, (record.run_id, record.interrupt_id), "interrupts")
    asked: set[tuple[str | None, str]] = set()
    for claim in commit.claims:
        _check_name(claim.interrupt_id, claim.run_id)
    for answer in commit.answers:
        _check_name(answer.interrupt_id, answer.run_id)
        if (answer.run_id, answer.interrupt_id) in asked:
            raise InterruptConflict(commit.thread_id, [answer.interrupt_id], "is answered twice")
        asked.add((answer.run_id, answer.interrupt_id))
        if answer.status not in ("resolved", "cancelled"):
            raise InvalidValue("answer.status", f"cannot be {answer.status!r}")


def _check_record(record: InterruptRecord, thread_id: str) -> None:
    check_id(record.interrupt_id, "interrupt_id")
    check_id(record.run_id, "interrupt.run_id")
    check_integer(record.requested_at, "interrupt.requested_at")
    if record.thread_id != thread_id:
        raise InvalidValue("interrupt.thread_id", "is not the commit's thread")


def _check_name(interrupt_id: str, run_id: str | None) -> None:
    check_id(interrupt_id, "interrupt_id")
    if run_id is not None:
        check_id(run_id, "interrupt.run_id")


def _once(seen: set[tuple[str, str]], key: tuple[str, str], what: str) -> None:
    if key in seen:
        raise InvalidValue(what, f"{key[1]!r} stands there twice")
    seen.add(key)
