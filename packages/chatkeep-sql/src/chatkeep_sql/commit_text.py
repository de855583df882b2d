# ruff: noqa: S608, ISC004  (names of tables and columns of ours; values are always bound)
"""The text of PostgreSQL's commit statement.

``WITH`` parts in the order in which they take effect:

* ``snap`` is the head as the statement's snapshot has it, ``head`` the same row locked. Had the
  statement to wait for the lock, the two differ in version, and it writes nothing: all it reads
  beside the head is from the snapshot, and every commit moves the version. So what it reads is
  what is there.
* ``run`` locks the run, after the head; leases are renewed without the head.
* ``base`` has one row if nothing refuses the commit, else none. Every write draws from it.
* ``gone`` and ``archived`` take off what the splice cuts, ``calc`` counts it, ``born`` or
  ``moved`` writes the head (a new one with its final values), ``done`` is the head after that;
  then entries, run, interrupts, activities and draft.

What shows only on write (a run id or a thread that another connection creates at this moment)
violates a unique index and so aborts the whole statement. The text is built for each shape of a
commit, with the parts it has; every bind has a cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sqlalchemy import TextClause, text

from chatkeep.codec import FORMAT_VERSION
from chatkeep_sql.head import REMEMBERED
from chatkeep_sql.postgres_text import NOW, Names, live_claim, names_of
from chatkeep_sql.rows import RUN_COLUMNS
from chatkeep_sql.schema import Tables

__all__ = ["START_VALUES", "CommitShape", "commit_statement"]

_TYPES = {
    "key": "bytea",
    "parent_key": "bytea",
    "owner_key": "bytea",
    "child": "boolean",
    "cancel_requested": "boolean",
    "format": "smallint",
} | dict.fromkeys(
    ("started_at", "finished_at", "lease_until", "hide_from", "detached_since"), "bigint"
)
_HEAD_VALUES = ("key", "owner_key", "tenant_id", "user_id", "thread_id", "child", "format")
START_VALUES = (
    "key", "run_id", "status", "started_at", "parent_key", "parent_run_id", "subagent_run_id",
    "name", "lease_token", "hide_from", "extra",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommitShape:
    """The parts that a commit has; commits of one shape share their statement."""

    splice: bool
    expected: bool
    archive: bool
    tail: bool
    start: bool
    hide: bool
    patch: tuple[str, ...] | None
    lease: bool
    needs_run: bool
    interrupts: bool
    answers: bool
    claims: bool
    activities: bool
    draft: bool


@lru_cache(maxsize=512)
def commit_statement(tables: Tables, shape: CommitShape) -> TextClause:
    """The statement for commits of ``shape``.

    Returns one row (incarnation, version, transcript version, newest, first number, count, cuts
    archived, whether the run is new, then the run's columns), or none.
    """
    builder = _Builder(names_of(tables), shape)
    parts = ",\n".join(f"{name} AS {body}" for name, body in builder.parts())
    run = ", ".join(f"after_run.{name}" for name in RUN_COLUMNS) if builder.writes_run else ""
    return text(
        f"WITH {parts}\n"
        "SELECT done.incarnation, done.version, done.transcript, done.newest, done.start,"
        f" CAST(:count AS integer), done.kept, {builder.created}"
        f"{', ' + run if run else ''}\nFROM done"
        + (" CROSS JOIN after_run" if builder.writes_run else "")
    )


class _Builder:
    """Writes the parts of one shape, in order."""

    def __init__(self, names: Names, shape: CommitShape) -> None:
        self.n = names
        self.shape = shape
        self.reads_run = shape.start or shape.lease or shape.needs_run
        self.writes_run = shape.start or shape.patch is not None
        self.created = "NOT EXISTS (SELECT 1 FROM run)" if shape.start else "false"

    def parts(self) -> list[tuple[str, str]]:
        """Name and body of each ``WITH`` part."""
        shape, n = self.shape, self.n
        found = [
            ("clock", f"MATERIALIZED (SELECT {NOW} AS now)"),
            (
                "snap",
                f"MATERIALIZED (SELECT thread_no, version FROM {n.threads}"
                " WHERE key = CAST(:t_key AS bytea))",
            ),
            (
                "head",
                "MATERIALIZED (SELECT thread_no, incarnation, version, transcript_version,"
                f" next_number, newest, message_count, commits FROM {n.threads}"
                f" WHERE key = CAST(:t_key AS bytea) AND format <= {FORMAT_VERSION}"
                " FOR NO KEY UPDATE)",
            ),
        ]
        if self.reads_run:
            # Counting the head's rows makes this part wait until the head is locked.
            found.append(
                (
                    "run",
                    f"MATERIALIZED (SELECT {', '.join(RUN_COLUMNS)}, run_no, thread_no"
                    f" FROM {n.runs} WHERE key = CAST(:run_key AS bytea)"
                    " AND (SELECT count(*) FROM head) >= 0 FOR NO KEY UPDATE)",
                )
            )
        if shape.answers:
            found.append(("answer", self._answered()))
        if shape.claims:
            found.append(("claim", self._claimed()))
        found.append(("base", self._base()))
        found += self._cut()
        found += self._head()
        found += self._writes()
        return found

    # -- judgement ----------------------------------------------------------------

    def _named(self, given: str, columns: str) -> str:
        """The interrupt that each row of ``given`` names: the pending one, else the newest."""
        return (
            f"MATERIALIZED (SELECT {columns} FROM {given} CROSS JOIN LATERAL ("
            f"SELECT sequence, status, claimed_by, thread_no FROM {self.n.interrupts}"
            " WHERE thread_no = (SELECT thread_no FROM head) AND interrupt_id = given.id"
            " AND (given.run IS NULL OR run_id = given.run)"
            " ORDER BY (status = 'pending') DESC, requested_at DESC, sequence DESC LIMIT 1) AS i"
            " WHERE i.status = 'pending'"
        )

    def _answered(self) -> str:
        given = (
            "unnest(CAST(:a_id AS text[]), CAST(:a_run AS text[]), CAST(:a_status AS text[]),"
            " CAST(:a_response AS text[])) AS given(id, run, status, response)"
        )
        free = (
            f" AND (i.claimed_by = CAST(:run_id AS text) OR NOT {live_claim(self.n, 'i')})"
            if self.shape.needs_run or self.shape.lease or self.shape.start
            else f" AND NOT {live_claim(self.n, 'i')}"
        )
        named = self._named(given, "i.sequence, given.status, given.response")
        return f"{named}{free})"

    def _claimed(self) -> str:
        given = "unnest(CAST(:c_id AS text[]), CAST(:c_run AS text[])) AS given(id, run)"
        return f"{self._named(given, 'i.sequence')} AND NOT {live_claim(self.n, 'i')})"

    def _base(self) -> str:
        shape, n = self.shape, self.n
        old = ["strpos(head.commits, CAST(:mark AS text)) = 0"]
        new: list[str] = []
        mine = "run.thread_no = head.thread_no"
        if shape.expected:
            old.append(
                "CAST(:expected AS text) = CASE WHEN head.transcript_version = 0 THEN ''"
                " ELSE to_hex(head.transcript_version) || '.' || head.incarnation END"
            )
            new.append("CAST(:expected AS text) = ''")
        if shape.start:
            old.append(
                f"NOT EXISTS (SELECT 1 FROM run WHERE NOT ({mine} AND (status = 'interrupted'"
                " OR (status = 'running' AND coalesce(lease_until <= clock.now, false)))"
                f" AND format <= {FORMAT_VERSION}))"
            )
            new.append("NOT EXISTS (SELECT 1 FROM run)")
        elif self.reads_run:
            open_ = [mine, f"format <= {FORMAT_VERSION}"]
            if self.writes_run:
                open_.append("status IN ('running', 'interrupted')")
            if shape.patch is not None and "status" in shape.patch:
                open_.append("NOT (status = 'interrupted' AND CAST(:p_status AS text) = 'running')")
            if shape.lease:
                open_.append("lease_token = CAST(:token AS text)")
            old.append(f"EXISTS (SELECT 1 FROM run WHERE {' AND '.join(open_)})")
            new.append("false")
        if shape.answers:
            old.append(
                "(SELECT count(DISTINCT sequence) FROM answer) = cardinality(CAST(:a_id AS text[]))"
            )
            new.append("false")
        if shape.claims:
            old.append(
                "(SELECT count(DISTINCT sequence) FROM claim) = cardinality(CAST(:c_id AS text[]))"
            )
            new.append("false")
        if shape.interrupts:
            old.append(
                f"NOT EXISTS (SELECT 1 FROM {n.interrupts} AS i WHERE"
                " i.thread_no = head.thread_no AND i.key = ANY (CAST(:i_key AS bytea[])))"
            )
        if shape.activities:
            old.append(
                f"(SELECT count(*) FROM {n.activities} AS a"
                " WHERE a.thread_no = head.thread_no) >= CAST(:needed AS bigint)"
            )
            new.append("CAST(:needed AS bigint) = 0")
        new_guards = "".join(f" AND {guard}" for guard in new)
        return (
            "MATERIALIZED (SELECT head.thread_no, head.incarnation, head.version + 1 AS version,"
            " head.transcript_version, head.next_number, head.newest, head.message_count,"
            " head.commits, clock.now FROM head"
            " JOIN snap ON snap.thread_no = head.thread_no AND snap.version = head.version"
            f" CROSS JOIN clock WHERE {' AND '.join(old)}"
            " UNION ALL SELECT NULL, CAST(:incarnation AS text), 1, 0, 1, 0, 0, '', clock.now"
            " FROM clock WHERE NOT EXISTS (SELECT 1 FROM snap) AND NOT EXISTS (SELECT 1 FROM head)"
            f"{new_guards})"
        )

    # -- cut and head -------------------------------------------------------------

    def _cut(self) -> list[tuple[str, str]]:
        if not self.shape.splice:
            return [
                (
                    "calc",
                    "MATERIALIZED (SELECT base.*, 0 AS n_cut, 0 AS kept, newest AS left_newest,"
                    " transcript_version AS transcript FROM base)",
                )
            ]
        behind = (
            "e.thread_no = base.thread_no AND e.number > CAST(:keep AS bigint) AND e.cut IS NULL"
        )
        returns = "e.message_id = ANY (CAST(:returning AS text[]))"
        found: list[tuple[str, str]] = []
        if self.shape.archive:
            if self.shape.tail:
                found.append(
                    (
                        "gone",
                        f"(DELETE FROM {self.n.entries} AS e USING base"
                        f" WHERE {behind} AND {returns} RETURNING e.number)",
                    )
                )
            stays = f" AND {returns} IS NOT TRUE" if self.shape.tail else ""
            found.append(
                (
                    "archived",
                    f"(UPDATE {self.n.entries} AS e SET cut = base.version FROM base"
                    f" WHERE {behind}{stays} RETURNING e.number)",
                )
            )
        else:
            found.append(
                (
                    "gone",
                    f"(DELETE FROM {self.n.entries} AS e USING base WHERE {behind}"
                    " RETURNING e.number)",
                )
            )
        names = [name for name, _ in found]
        total = " + ".join(f"(SELECT count(*) FROM {name})" for name in names)
        kept = "(SELECT count(*) FROM archived)" if "archived" in names else "0"
        found.append(
            (
                "cut",
                f"MATERIALIZED (SELECT {total} AS n_cut, {kept} AS kept)",
            )
        )
        grew = " OR CAST(:count AS integer) > 0"
        found.append(
            (
                "calc",
                "MATERIALIZED (SELECT base.*, cut.n_cut, cut.kept,"
                " CASE WHEN cut.n_cut = 0 THEN base.newest ELSE coalesce("
                f"(SELECT max(e.number) FROM {self.n.entries} AS e"
                " WHERE e.thread_no = base.thread_no AND e.number <= CAST(:keep AS bigint)"
                " AND e.cut IS NULL), 0) END AS left_newest,"
                f" CASE WHEN cut.n_cut > 0{grew} THEN base.version"
                " ELSE base.transcript_version END AS transcript FROM base CROSS JOIN cut)",
            )
        )
        return found

    def _head(self) -> list[tuple[str, str]]:
        count = "CAST(:count AS integer)"
        newest = f"CASE WHEN {count} > 0 THEN next_number + {count} - 1 ELSE left_newest END"
        numbers = (
            f"CASE WHEN {count} > 0 THEN next_number || '-' || next_number + {count} - 1"
            " ELSE '-' END"
        )
        line = (
            "concat_ws(' ', CAST(:mark AS text), version, version - transcript,"
            f" {newest}, {numbers}, CAST({self.created} AS integer) + CASE WHEN kept > 0"
            " THEN 2 ELSE 0 END)"
        )
        commits = (
            f"array_to_string(ARRAY[{line}]"
            f" || (string_to_array(commits, chr(10)))[1 : {REMEMBERED - 1}], chr(10))"
        )
        counters = {
            "version": "version",
            "transcript_version": "transcript",
            "next_number": f"next_number + {count}",
            "newest": newest,
            "message_count": f"message_count - n_cut + {count}",
            "commits": commits,
            "updated_at": "now",
        }
        columns = ", ".join((*_HEAD_VALUES, "incarnation", "created_at", *counters))
        values = ", ".join(
            (
                *(f"CAST(:t_{name} AS {_TYPES.get(name, 'text')})" for name in _HEAD_VALUES),
                "incarnation",
                "now",
                *counters.values(),
            )
        )
        sets = ", ".join(f"{column} = calc.{column}_" for column in counters)
        after = ", ".join(f"{value} AS {column}_" for column, value in counters.items())
        threads = self.n.threads
        return [
            (
                "born",
                f"(INSERT INTO {threads} ({columns}) SELECT {values} FROM calc"
                " WHERE thread_no IS NULL RETURNING thread_no)",
            ),
            (
                "moved",
                f"(UPDATE {threads} AS t SET {sets} FROM"
                f" (SELECT thread_no, {after} FROM calc) AS calc"
                " WHERE t.thread_no = calc.thread_no RETURNING t.thread_no)",
            ),
            (
                "done",
                "MATERIALIZED (SELECT w.thread_no, c.incarnation, c.version, c.transcript,"
                f" {newest} AS newest, c.left_newest,"
                f" CASE WHEN {count} > 0 THEN c.next_number ELSE 0 END AS start, c.kept, c.now"
                " FROM calc AS c CROSS JOIN"
                " (SELECT thread_no FROM born UNION ALL SELECT thread_no FROM moved) AS w)",
            ),
        ]

    # -- writes -------------------------------------------------------------------

    def _writes(self) -> list[tuple[str, str]]:
        shape, n = self.shape, self.n
        found: list[tuple[str, str]] = []
        if shape.tail:
            found.append(
                (
                    "tail",
                    f"(INSERT INTO {n.entries}"
                    " (thread_no, number, message_id, digest, body, cut, format)"
                    " SELECT done.thread_no, done.start + m.place - 1, m.id, m.digest, m.body,"
                    f" NULL, {FORMAT_VERSION} FROM done CROSS JOIN unnest(CAST(:ids AS text[]),"
                    " CAST(:digests AS bytea[]), CAST(:bodies AS text[]))"
                    " WITH ORDINALITY AS m(id, digest, body, place))",
                )
            )
        if shape.splice and shape.archive:
            found.append(
                (
                    "cut_record",
                    f"(INSERT INTO {n.cuts} (thread_no, cut, after, cut_at, run_id, extra, format)"
                    " SELECT thread_no, version, left_newest, now, CAST(:cut_run_id AS text), 0,"
                    f" {FORMAT_VERSION} FROM done WHERE kept > 0)",
                )
            )
        if shape.start:
            found += self._start()
        elif self.writes_run:
            found.append(("after_run", self._patch()))
        if shape.interrupts:
            found.append(
                (
                    "asked",
                    f"(INSERT INTO {n.interrupts} (thread_no, key, run_id, interrupt_id, status,"
                    " requested_at, payload, extra, format) SELECT done.thread_no, m.key,"
                    " m.run_id, m.interrupt_id, 'pending', m.requested_at, m.payload, m.extra,"
                    f" {FORMAT_VERSION} FROM done CROSS JOIN unnest(CAST(:i_key AS bytea[]),"
                    " CAST(:i_run_id AS text[]), CAST(:i_interrupt_id AS text[]),"
                    " CAST(:i_requested_at AS bigint[]), CAST(:i_payload AS text[]),"
                    " CAST(:i_extra AS text[])) WITH ORDINALITY AS"
                    " m(key, run_id, interrupt_id, requested_at, payload, extra, place)"
                    " ORDER BY m.place)",
                )
            )
        if shape.answers:
            found.append(
                (
                    "settled",
                    f"(UPDATE {n.interrupts} AS i SET status = answer.status,"
                    " resolved_at = done.now, response = answer.response, claimed_by = NULL"
                    " FROM done CROSS JOIN answer WHERE i.sequence = answer.sequence)",
                )
            )
        if shape.claims:
            found.append(
                (
                    "claimed",
                    f"(UPDATE {n.interrupts} AS i SET claimed_by = CAST(:run_id AS text)"
                    " FROM done CROSS JOIN claim WHERE i.sequence = claim.sequence)",
                )
            )
        if shape.activities:
            found += [
                (
                    "fewer",
                    f"(DELETE FROM {n.activities} AS a USING done WHERE"
                    " a.thread_no = done.thread_no AND a.position >= CAST(:length AS integer))",
                ),
                (
                    "shown",
                    f"(INSERT INTO {n.activities} (thread_no, position, body, format)"
                    f" SELECT done.thread_no, m.position, m.body, {FORMAT_VERSION} FROM done"
                    " CROSS JOIN unnest(CAST(:positions AS integer[]), CAST(:rows AS text[]))"
                    " AS m(position, body) ON CONFLICT (thread_no, position)"
                    " DO UPDATE SET body = excluded.body, format = excluded.format)",
                ),
            ]
        if shape.draft:
            found.append(
                (
                    "undrafted",
                    f"(DELETE FROM {n.drafts} AS d USING done WHERE d.thread_no = done.thread_no"
                    f" AND d.run_no = (SELECT run_no FROM {n.runs}"
                    " WHERE key = CAST(:draft_key AS bytea)))",
                )
            )
        return found

    def _start(self) -> list[tuple[str, str]]:
        lease = (
            "CASE WHEN CAST(:s_lease_token AS text) IS NULL THEN NULL"
            " ELSE done.now + CAST(:lease_ms AS bigint) END"
        )
        hide = ", hide_from = CAST(:s_hide_from AS bigint)" if self.shape.hide else ""
        columns = ", ".join(("thread_no", *START_VALUES, "lease_until", "format"))
        values = ", ".join(f"CAST(:s_{v} AS {_TYPES.get(v, 'text')})" for v in START_VALUES)
        returning = ", ".join(RUN_COLUMNS)
        mine = ", ".join(f"r.{name}" for name in RUN_COLUMNS)
        return [
            (
                "started",
                f"(INSERT INTO {self.n.runs} ({columns})"
                f" SELECT done.thread_no, {values}, {lease}, {FORMAT_VERSION}"
                f" FROM done WHERE NOT EXISTS (SELECT 1 FROM run) RETURNING {returning})",
            ),
            (
                "resumed",
                f"(UPDATE {self.n.runs} AS r SET lease_token = CAST(:s_lease_token AS text),"
                f" lease_until = {lease}{hide} FROM done CROSS JOIN run"
                f" WHERE r.run_no = run.run_no RETURNING {mine})",
            ),
            ("after_run", "(SELECT * FROM started UNION ALL SELECT * FROM resumed)"),
        ]

    def _patch(self) -> str:
        sets = [
            f"{name} = CAST(:p_{name} AS {_TYPES.get(name, 'text')})"
            for name in self.shape.patch or ()
        ]
        mine = ", ".join(f"r.{name}" for name in RUN_COLUMNS)
        return (
            f"(UPDATE {self.n.runs} AS r SET {', '.join(sets) or f'format = {FORMAT_VERSION}'}"
            f" FROM done CROSS JOIN run WHERE r.run_no = run.run_no RETURNING {mine})"
        )
