"""The plain statements, built once for each schema; SQLAlchemy compiles each once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from sqlalchemy import (
    Select,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.sql.dml import Delete, Insert, ReturningDelete, ReturningInsert

from chatkeep.codec import FORMAT_VERSION
from chatkeep_sql.head import HEAD_COLUMNS
from chatkeep_sql.program import StoreNow
from chatkeep_sql.rows import INTERRUPT_COLUMNS, RUN_COLUMNS
from chatkeep_sql.schema import Tables

__all__ = ["Statements", "in_chunks", "statements_for"]


@lru_cache(maxsize=64)
def statements_for(tables: Tables) -> Statements:
    """The statements on ``tables``."""
    return Statements(tables)


class Statements:
    """Statements by what they do. Binds that find rows start with ``by_``."""

    def __init__(self, tables: Tables) -> None:
        self.t = tables

    # -- heads --------------------------------------------------------------------

    @cached_property
    def now(self) -> Select[*tuple[Any, ...]]:
        """The store's clock."""
        return select(StoreNow())

    @cached_property
    def head(self) -> Select[*tuple[Any, ...]]:
        """Head columns and the clock, by ``by_key``."""
        t = self.t.threads
        return select(*(t.c[name] for name in HEAD_COLUMNS), StoreNow()).where(
            t.c.key == bindparam("by_key")
        )

    @cached_property
    def lock_head(self) -> Select[*tuple[Any, ...]]:
        """The same, locked against other writers (but not against foreign keys)."""
        return self.head.with_for_update(key_share=True)

    @cached_property
    def insert_head(self) -> ReturningInsert[Any]:
        """A new thread; returns its number."""
        return insert(self.t.threads).returning(self.t.threads.c.thread_no)

    @cached_property
    def update_head(self) -> Update:
        """Set columns of a head, by ``by_thread``."""
        t = self.t.threads
        return update(t).where(t.c.thread_no == bindparam("by_thread"))

    @cached_property
    def delete_thread(self) -> list[Delete]:
        """All that hangs on a thread, then its head. Foreign keys would do that too, but SQLite
        only minds them on connections that were told to."""
        t = self.t
        tables = (t.entries, t.cuts, t.drafts, t.interrupts, t.activities, t.runs, t.threads)
        return [delete(x).where(x.c.thread_no == bindparam("by_thread")) for x in tables]

    # -- entries ------------------------------------------------------------------

    @cached_property
    def live_behind(self) -> Select[*tuple[Any, ...]]:
        """Number and message id of the live entries above ``after``."""
        t = self.t.entries
        return (
            select(t.c.number, t.c.message_id)
            .where(
                t.c.thread_no == bindparam("by_thread"),
                t.c.number > bindparam("after"),
                t.c.cut.is_(None),
            )
            .order_by(t.c.number)
        )

    @cached_property
    def newest_up_to(self) -> Select[*tuple[Any, ...]]:
        """The highest live number up to ``upto``."""
        t = self.t.entries
        return select(func.max(t.c.number)).where(
            t.c.thread_no == bindparam("by_thread"),
            t.c.number <= bindparam("upto"),
            t.c.cut.is_(None),
        )

    @cached_property
    def insert_entry(self) -> Insert:
        """One message."""
        return insert(self.t.entries)

    @cached_property
    def archive_behind(self) -> Update:
        """Mark what is still live above ``after`` as cut by commit ``to_cut``."""
        t = self.t.entries
        return (
            update(t)
            .where(
                t.c.thread_no == bindparam("by_thread"),
                t.c.number > bindparam("after"),
                t.c.cut.is_(None),
            )
            .values(cut=bindparam("to_cut"))
        )

    @cached_property
    def restore_entries(self) -> Update:
        """Make the entries of cut ``by_cut`` live again."""
        t = self.t.entries
        return (
            update(t)
            .where(t.c.thread_no == bindparam("by_thread"), t.c.cut == bindparam("by_cut"))
            .values(cut=null())
        )

    @cached_property
    def delete_entry(self) -> Delete:
        """One entry, by number."""
        t = self.t.entries
        return delete(t).where(
            t.c.thread_no == bindparam("by_thread"), t.c.number == bindparam("by_number")
        )

    @cached_property
    def delete_cut_entries(self) -> Delete:
        """The entries of one cut."""
        t = self.t.entries
        return delete(t).where(
            t.c.thread_no == bindparam("by_thread"), t.c.cut == bindparam("by_cut")
        )

    @lru_cache(maxsize=32)  # noqa: B019  (statements live as long as the process)
    def window(self, what: str, *, limited: bool, before: bool) -> Select[*tuple[Any, ...]]:
        """Live entries: number, and body or digest; the newest ``limit`` come first."""
        t = self.t.entries
        columns: dict[str, Any] = {
            "bodies": case((t.c.format <= FORMAT_VERSION, t.c.body)),
            "digests": t.c.digest,
            "numbers": null(),
        }
        query = select(t.c.number, columns[what]).where(
            t.c.thread_no == bindparam("by_thread"), t.c.cut.is_(None)
        )
        if before:
            query = query.where(t.c.number < bindparam("before"))
        if limited:
            return query.order_by(t.c.number.desc()).limit(bindparam("limit"))
        return query.order_by(t.c.number)

    @cached_property
    def all_ids(self) -> Select[*tuple[Any, ...]]:
        """Number, message id and cut of every entry."""
        t = self.t.entries
        return (
            select(t.c.number, t.c.message_id, t.c.cut)
            .where(t.c.thread_no == bindparam("by_thread"))
            .order_by(t.c.number)
        )

    # -- cuts ---------------------------------------------------------------------

    @cached_property
    def cuts(self) -> Select[*tuple[Any, ...]]:
        """The cuts of a thread, oldest first."""
        t = self.t.cuts
        return (
            select(t.c.cut, t.c.after, t.c.cut_at, t.c.run_id, t.c.extra, t.c.format)
            .where(t.c.thread_no == bindparam("by_thread"))
            .order_by(t.c.cut)
        )

    @cached_property
    def cut(self) -> Select[*tuple[Any, ...]]:
        """One cut."""
        return self.cuts.where(self.t.cuts.c.cut == bindparam("by_cut"))

    @cached_property
    def cut_numbers(self) -> Select[*tuple[Any, ...]]:
        """Number and message id of a cut's entries."""
        t = self.t.entries
        return (
            select(t.c.number, t.c.message_id)
            .where(t.c.thread_no == bindparam("by_thread"), t.c.cut == bindparam("by_cut"))
            .order_by(t.c.number)
        )

    @cached_property
    def cut_bodies(self) -> Select[*tuple[Any, ...]]:
        """Number and body of a cut's entries."""
        t = self.t.entries
        return (
            select(t.c.number, case((t.c.format <= FORMAT_VERSION, t.c.body)))
            .where(t.c.thread_no == bindparam("by_thread"), t.c.cut == bindparam("by_cut"))
            .order_by(t.c.number)
        )

    @cached_property
    def archived_ids(self) -> Select[*tuple[Any, ...]]:
        """Cut, number and message id of every archived entry."""
        t = self.t.entries
        return (
            select(t.c.cut, t.c.number, t.c.message_id)
            .where(t.c.thread_no == bindparam("by_thread"), t.c.cut.is_not(None))
            .order_by(t.c.cut, t.c.number)
        )

    @cached_property
    def insert_cut(self) -> Insert:
        """One cut record."""
        return insert(self.t.cuts)

    @cached_property
    def update_cut(self) -> Update:
        """Set columns of a cut."""
        t = self.t.cuts
        return update(t).where(
            t.c.thread_no == bindparam("by_thread"), t.c.cut == bindparam("by_cut")
        )

    @cached_property
    def delete_cut(self) -> Delete:
        """One cut record (not its entries)."""
        t = self.t.cuts
        return delete(t).where(
            t.c.thread_no == bindparam("by_thread"), t.c.cut == bindparam("by_cut")
        )

    # -- runs ---------------------------------------------------------------------

    def _runs(self) -> Select[*tuple[Any, ...]]:
        t, threads = self.t.runs, self.t.threads
        return select(
            *(t.c[name] for name in RUN_COLUMNS),
            t.c.run_no,
            t.c.thread_no,
            threads.c.thread_id,
        ).join_from(t, threads, t.c.thread_no == threads.c.thread_no)

    @cached_property
    def run(self) -> Select[*tuple[Any, ...]]:
        """A run by ``by_key``, then its number, its thread's number and id."""
        return self._runs().where(self.t.runs.c.key == bindparam("by_key"))

    @cached_property
    def lock_run(self) -> Select[*tuple[Any, ...]]:
        """The same, locked."""
        return self.run.with_for_update(key_share=True, of=self.t.runs)

    @cached_property
    def thread_runs(self) -> Select[*tuple[Any, ...]]:
        """All runs of a thread, in order."""
        t = self.t.runs
        return (
            self._runs()
            .where(t.c.thread_no == bindparam("by_thread"))
            .order_by(t.c.started_at, t.c.run_no)
        )

    @cached_property
    def running_runs(self) -> Select[*tuple[Any, ...]]:
        """The running ones of a thread, in order."""
        return self.thread_runs.where(self.t.runs.c.status == literal_column("'running'"))

    @cached_property
    def insert_run(self) -> ReturningInsert[Any]:
        """A new run; returns its number."""
        return insert(self.t.runs).returning(self.t.runs.c.run_no)

    @cached_property
    def update_run(self) -> Update:
        """Set columns of a run, by ``by_run``."""
        t = self.t.runs
        return update(t).where(t.c.run_no == bindparam("by_run"))

    def child_runs(self, count: int) -> Select[*tuple[Any, ...]]:
        """Runs whose parent is one of ``count`` digests ``by_0``, ``by_1``, …, in order."""
        t = self.t.runs
        return (
            self._runs()
            .where(or_(*(t.c.parent_key == bindparam(f"by_{i}") for i in range(count))))
            .order_by(t.c.started_at, t.c.run_no)
        )

    @lru_cache(maxsize=8)  # noqa: B019  (statements live as long as the process)
    def due_runs(self, column: str, *, every_scope: bool) -> Select[*tuple[Any, ...]]:
        """Running runs with ``column`` up to ``due``: run, scope, draft; the oldest first."""
        t, threads, drafts = self.t.runs, self.t.threads, self.t.drafts
        due = t.c[column]
        query = (
            select(
                *(t.c[name] for name in RUN_COLUMNS),
                threads.c.thread_id,
                threads.c.tenant_id,
                threads.c.user_id,
                drafts.c.updated_at,
                drafts.c.body,
                drafts.c.format,
            )
            .select_from(
                t.join(threads, t.c.thread_no == threads.c.thread_no).join(
                    drafts, drafts.c.run_no == t.c.run_no, isouter=True
                )
            )
            .where(
                t.c.status == literal_column("'running'"),
                due <= (StoreNow() if column == "lease_until" else bindparam("due")),
            )
            .order_by(due, t.c.run_no)
            .limit(bindparam("limit"))
        )
        if not every_scope:
            query = query.where(threads.c.owner_key == bindparam("by_owner"))
        return query

    # -- drafts -------------------------------------------------------------------

    @cached_property
    def draft(self) -> Select[*tuple[Any, ...]]:
        """Whether a run has a draft."""
        t = self.t.drafts
        return select(t.c.run_no).where(t.c.run_no == bindparam("by_run"))

    @cached_property
    def drafts(self) -> Select[*tuple[Any, ...]]:
        """The drafts of a thread: run id, time, body, format, run number."""
        t, runs = self.t.drafts, self.t.runs
        return (
            select(runs.c.run_id, t.c.updated_at, t.c.body, t.c.format, t.c.run_no)
            .join_from(t, runs, t.c.run_no == runs.c.run_no)
            .where(t.c.thread_no == bindparam("by_thread"))
            .order_by(t.c.run_no)
        )

    @cached_property
    def open_drafts(self) -> Select[*tuple[Any, ...]]:
        """Those of :attr:`drafts` that readers see: an ended run has none."""
        status = self.t.runs.c.status
        return self.drafts.where(or_(status == "running", status == "interrupted"))

    @cached_property
    def insert_draft(self) -> Insert:
        """One draft."""
        return insert(self.t.drafts)

    @cached_property
    def update_draft(self) -> Update:
        """Set columns of a draft."""
        t = self.t.drafts
        return update(t).where(t.c.run_no == bindparam("by_run"))

    @cached_property
    def delete_draft(self) -> Delete:
        """The draft of the run ``by_key``, in this thread."""
        t, runs = self.t.drafts, self.t.runs
        run_no = select(runs.c.run_no).where(
            runs.c.key == bindparam("by_key"), runs.c.thread_no == bindparam("by_thread")
        )
        return delete(t).where(t.c.run_no == run_no.scalar_subquery())

    # -- interrupts ---------------------------------------------------------------

    @cached_property
    def interrupts(self) -> Select[*tuple[Any, ...]]:
        """The interrupts of a thread, in order, then sequence and whether the claim lives."""
        t, runs = self.t.interrupts, self.t.runs
        live = and_(
            runs.c.status.in_([literal_column("'running'"), literal_column("'interrupted'")]),
            or_(runs.c.lease_until.is_(None), runs.c.lease_until > StoreNow()),
        )
        claim = (
            select(runs.c.run_no)
            .where(
                runs.c.thread_no == t.c.thread_no,
                runs.c.run_id == t.c.claimed_by,
                live,
            )
            .exists()
        )
        return (
            select(
                *(t.c[name] for name in INTERRUPT_COLUMNS),
                t.c.sequence,
                and_(t.c.claimed_by.is_not(None), claim),
            )
            .where(t.c.thread_no == bindparam("by_thread"))
            .order_by(t.c.requested_at, t.c.sequence)
        )

    @cached_property
    def pending_interrupts(self) -> Select[*tuple[Any, ...]]:
        """The pending ones."""
        return self.interrupts.where(self.t.interrupts.c.status == literal_column("'pending'"))

    def interrupts_by_id(self, count: int) -> Select[*tuple[Any, ...]]:
        """Those with one of ``count`` interrupt ids ``id_0``, ``id_1``, …"""
        t = self.t.interrupts
        return self.interrupts.where(
            or_(*(t.c.interrupt_id == bindparam(f"id_{i}") for i in range(count)))
        )

    @cached_property
    def insert_interrupt(self) -> Insert:
        """One interrupt."""
        return insert(self.t.interrupts)

    @cached_property
    def update_interrupt(self) -> Update:
        """Set columns of an interrupt, by ``by_sequence``."""
        t = self.t.interrupts
        return update(t).where(t.c.sequence == bindparam("by_sequence"))

    # -- activities ---------------------------------------------------------------

    @cached_property
    def activities(self) -> Select[*tuple[Any, ...]]:
        """Body and format of the UI rows, in order, then position."""
        t = self.t.activities
        return (
            select(t.c.body, t.c.format, t.c.position)
            .where(t.c.thread_no == bindparam("by_thread"))
            .order_by(t.c.position)
        )

    @cached_property
    def activity_count(self) -> Select[*tuple[Any, ...]]:
        """How many UI rows a thread has."""
        t = self.t.activities
        return select(func.count()).where(t.c.thread_no == bindparam("by_thread"))

    @cached_property
    def delete_activities(self) -> Delete:
        """The UI rows from ``from_position`` on."""
        t = self.t.activities
        return delete(t).where(
            t.c.thread_no == bindparam("by_thread"), t.c.position >= bindparam("from_position")
        )

    @cached_property
    def delete_activity(self) -> Delete:
        """One UI row."""
        t = self.t.activities
        return delete(t).where(
            t.c.thread_no == bindparam("by_thread"), t.c.position == bindparam("by_position")
        )

    @cached_property
    def insert_activity(self) -> Insert:
        """One UI row."""
        return insert(self.t.activities)

    # -- thread lists -------------------------------------------------------------

    @lru_cache(maxsize=8)  # noqa: B019  (statements live as long as the process)
    def threads_page(self, *, after: bool, children: bool) -> Select[*tuple[Any, ...]]:
        """Thread id, created, updated, count, number; the newest first."""
        t = self.t.threads
        query = (
            select(t.c.thread_id, t.c.created_at, t.c.updated_at, t.c.message_count, t.c.thread_no)
            .where(t.c.owner_key == bindparam("by_owner"))
            .order_by(t.c.updated_at.desc(), t.c.thread_no.desc())
            .limit(bindparam("limit"))
        )
        if not children:
            query = query.where(~t.c.child)
        if after:
            # Not a row comparison: this form uses the index on every SQLite too.
            query = query.where(
                t.c.updated_at <= bindparam("updated_at"),
                or_(
                    t.c.updated_at < bindparam("updated_at"),
                    t.c.thread_no < bindparam("thread_no"),
                ),
            )
        return query

    @cached_property
    def idle_threads(self) -> Select[*tuple[Any, ...]]:
        """Tenant, user and thread id of threads not written for ``idle_ms``."""
        t = self.t.threads
        return (
            select(t.c.tenant_id, t.c.user_id, t.c.thread_id)
            .where(t.c.updated_at <= StoreNow() - bindparam("idle_ms"), ~t.c.child)
            .order_by(t.c.updated_at, t.c.thread_no)
            .limit(bindparam("limit"))
        )

    @cached_property
    def threads_with_cuts(self) -> Select[*tuple[Any, ...]]:
        """Tenant, user and thread id of threads with a cut made before ``before``."""
        t, cuts = self.t.threads, self.t.cuts
        oldest = func.min(cuts.c.cut_at)
        return (
            select(t.c.tenant_id, t.c.user_id, t.c.thread_id)
            .join_from(cuts, t, cuts.c.thread_no == t.c.thread_no)
            .where(cuts.c.cut_at < bindparam("before"))
            .group_by(t.c.thread_no, t.c.tenant_id, t.c.user_id, t.c.thread_id)
            .order_by(oldest, t.c.thread_no)
            .limit(bindparam("limit"))
        )

    # -- metadata -----------------------------------------------------------------

    @cached_property
    def value(self) -> Select[*tuple[Any, ...]]:
        """Value, revision and format of one key."""
        t = self.t.values
        return select(t.c.value, t.c.revision, t.c.format).where(
            t.c.key_digest == bindparam("by_key")
        )

    @cached_property
    def lock_value(self) -> Select[*tuple[Any, ...]]:
        """The same, locked."""
        return self.value.with_for_update()

    @cached_property
    def values_of(self) -> Select[*tuple[Any, ...]]:
        """Namespace, value and format of all values under one key."""
        t = self.t.values
        return (
            select(t.c.namespace, t.c.value, t.c.format)
            .where(t.c.owner_key == bindparam("by_owner"))
            .order_by(t.c.namespace)
        )

    @cached_property
    def insert_value(self) -> Insert:
        """One value."""
        return insert(self.t.values)

    @cached_property
    def update_value(self) -> Update:
        """Set columns of a value."""
        t = self.t.values
        return update(t).where(t.c.key_digest == bindparam("by_key"))

    @cached_property
    def delete_value(self) -> Delete:
        """One value."""
        t = self.t.values
        return delete(t).where(t.c.key_digest == bindparam("by_key"))

    @cached_property
    def delete_values_of(self) -> ReturningDelete[Any]:
        """All values under one key; returns one row each."""
        t = self.t.values
        return delete(t).where(t.c.owner_key == bindparam("by_owner")).returning(t.c.namespace)


def in_chunks(items: Sequence[Any], size: int = 100) -> list[Sequence[Any]]:
    """``items`` in runs of ``size``: a statement has a bounded number of binds."""
    return [items[i : i + size] for i in range(0, len(items), size)]
