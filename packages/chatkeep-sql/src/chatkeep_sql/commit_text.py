# ruff: noqa: S608, ISC004  (names of tables and columns of ours; values are always bound)
"""The text of PostgreSQL's commit statement.

``WITH`` parts in the order in which they take effect:

* ``snap`` is the head as the statement's snapshot has it, ``head`` the same row locked. Had the
  statement to wait for the lock, the two differ in version, and it writes nothing: all it reads
  beside the head is from the snapshot, and every commit moves the version. So what it reads is
  what is there.
* ``run`` locks the run, after the head; leases are renewed without the head.
* ``base`` has one row if nothing refuses the commit, else none. Every write draws from it.
* ``gone`` and ``archived`` take off what the splice cuts, ``calc`` counts it, ``done`` writes the
  head (a new one with its final values); then entries, run, interrupts, activities, draft.

What shows only on write (a run id or a thread that another connection creates at this moment)
violates a unique index and so aborts the whole statement.

PostgreSQL spends more on setting a statement's parts up than on running them, so the text is
built for each shape of a commit, with the parts it has and no others: one that appends has
nothing to cut with. Every bind has a cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from sqlalchemy import TextClause, text

from chatkeep.codec import FORMAT_VERSION
from chatkeep_sql.head import REMEMBERED
from chatkeep_sql.postgres_text import NOW, Names, live_claim, names_of
from chatkeep_sql.rows import RUN_COLUMNS
from chatkeep_sql.schema import Tables

__all__ = ["CommitShape", "commit_statement"]

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
_START_VALUES = (
    "key", "run_id", "status", "started_at", "parent_key", "parent_run_id", "subagent_run_id",
    "name", "lease_token", "hide_from", "extra",
)  # fmt: skip
_COUNT = "CAST(:count AS integer)"


@dataclass(frozen=True, slots=True)
class CommitShape:
    """The parts that a commit has; commits of one shape share their statement.

    ``head``: the thread is taken to be there, or to be new, or nobody knows. ``cuts``: something
    live may stand behind what the splice keeps. ``start``: the run is taken to be new, or
    to be there. Where that was wrong the statement writes nothing.
    """

    head: Literal["there", "new", "either"]
    splice: bool
    cuts: bool
    expected: bool
    archive: bool
    tail: bool
    start: Literal["", "new", "again"]
    hide: bool
    patch: tuple[str, ...] | None
    lease: bool
    needs_run: bool
    own_draft: bool
    other_draft: bool
    interrupts: bool
    answers: bool
    claims: bool
    activities: bool


@lru_cache(maxsize=512)
def commit_statement(tables: Tables, shape: CommitShape) -> TextClause:
    """The statement for commits of ``shape``.

    Returns one row (incarnation, version, transcript version, newest, first number, count, cuts
    archived, then the run's columns if it writes one), or none.
    """
    builder = _Builder(names_of(tables), shape)
    parts = ",\n".join(f"{name} AS {body}" for name, body in builder.parts())
    run = "".join(f", after_run.{name}" for name in RUN_COLUMNS) if builder.writes_run else ""
    return text(
        f"WITH {parts}\n"
        "SELECT done.incarnation, done.version, done.transcript, done.newest,"
        f" done.next_number - {_COUNT}, {_COUNT}, {builder.kept}{run}\nFROM done"
        + (" CROSS JOIN after_run" if builder.writes_run else "")
    )


class _Builder:
    """Writes the parts of one shape, in order."""

    def __init__(self, names: Names, shape: CommitShape) -> None:
        self.n = names
        self.shape = shape
        self.reads_run = shape.start == "again" or shape.lease or shape.needs_run
        self.writes_run = bool(shape.start) or shape.patch is not None
        self.kept = "(SELECT kept FROM calc)" if shape.cuts and shape.archive else "0"

    def parts(self) -> list[tuple[str, str]]:
        """Name and body of each ``WITH`` part."""
        shape, n = self.shape, self.n
        found: list[tuple[str, str]] = []
        if shape.head != "new":
            found += [
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
        found.append(("base" if shape.cuts else "calc", self._base()))
        if shape.cuts:
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
        named = self._named(given, "i.sequence, given.status, given.response")
        mine = "coalesce(i.claimed_by = CAST(:run_id AS text), false)"
        return f"{named} AND ({mine} OR NOT {live_claim(self.n, 'i')}))"

    def _claimed(self) -> str:
        given = "unnest(CAST(:c_id AS text[]), CAST(:c_run AS text[])) AS given(id, run)"
        return f"{self._named(given, 'i.sequence')} AND NOT {live_claim(self.n, 'i')})"

    def _base(self) -> str:
        branches: list[str] = []
        columns = (
            "thread_no", "incarnation", "version + 1 AS version", "transcript_version",
            "next_number", "newest", "message_count", "commits",
        )  # fmt: skip
        fresh = "NULL, CAST(:incarnation AS text), 1, 0, 1, 0, 0, ''"
        # Without a cut this part is ``calc`` already.
        more = (
            ""
            if self.shape.cuts
            else ", 0 AS n_cut, {newest} AS left_newest, {transcript} AS transcript"
        )
        if self.shape.head != "new":
            moves = "head.version + 1" if self.shape.tail else "head.transcript_version"
            branches.append(
                f"SELECT {', '.join(f'head.{column}' for column in columns)}, {NOW} AS now"
                f"{more.format(newest='head.newest', transcript=moves)} FROM head"
                " JOIN snap ON snap.thread_no = head.thread_no AND snap.version = head.version"
                f" WHERE {' AND '.join(self._guards())}"
            )
        if self.shape.head != "there":
            moves = "1" if self.shape.tail else "0"
            names = "CAST(NULL AS bigint)" if self.shape.head == "new" else "NULL"
            values = fresh.replace("NULL", names, 1)
            guards = [
                f"NOT EXISTS (SELECT 1 FROM {self.n.threads} WHERE key = CAST(:t_key AS bytea))"
            ]
            if self.shape.head == "either":
                guards.append("NOT EXISTS (SELECT 1 FROM head)")
            guards += self._guards_of_new()
            aliases = (
                "thread_no", "incarnation", "version", "transcript_version", "next_number",
                "newest", "message_count", "commits",
            )  # fmt: skip
            listed = ", ".join(
                f"{value} AS {alias}"
                for value, alias in zip(values.split(", "), aliases, strict=True)
            )
            branches.append(
                f"SELECT {listed}, {NOW} AS now{more.format(newest='0', transcript=moves)}"
                f" WHERE {' AND '.join(guards)}"
            )
        return f"MATERIALIZED ({' UNION ALL '.join(branches)})"

    def _guards(self) -> list[str]:
        """What must hold of a thread that is there."""
        shape, n = self.shape, self.n
        found = ["strpos(head.commits, CAST(:mark AS text)) = 0"]
        if shape.expected:
            found.append(
                "CAST(:expected AS text) = CASE WHEN head.transcript_version = 0 THEN ''"
                " ELSE to_hex(head.transcript_version) || '.' || head.incarnation END"
            )
        if shape.splice and not shape.cuts:
            found.append("head.newest <= CAST(:keep AS bigint)")
        if shape.start == "new":
            found.append(self._no_such_run())
        if self.reads_run:
            run = ["run.thread_no = head.thread_no", f"run.format <= {FORMAT_VERSION}"]
            if shape.start:
                run.append(
                    "(run.status = 'interrupted' OR (run.status = 'running'"
                    f" AND coalesce(run.lease_until <= {NOW}, false)))"
                )
            elif self.writes_run:
                run.append("run.status IN ('running', 'interrupted')")
            if shape.patch is not None and "status" in shape.patch:
                run.append(
                    "NOT (run.status = 'interrupted' AND CAST(:p_status AS text) = 'running')"
                )
            if shape.lease:
                run.append("run.lease_token = CAST(:token AS text)")
            found.append(f"EXISTS (SELECT 1 FROM run WHERE {' AND '.join(run)})")
        for part, ids in (("answer", "a_id"), ("claim", "c_id")):
            if (part == "answer" and shape.answers) or (part == "claim" and shape.claims):
                found.append(
                    f"(SELECT count(DISTINCT sequence) FROM {part}) ="
                    f" cardinality(CAST(:{ids} AS text[]))"
                )
        if shape.interrupts:
            found.append(
                f"NOT EXISTS (SELECT 1 FROM {n.interrupts} AS i WHERE"
                " i.thread_no = head.thread_no AND i.key = ANY (CAST(:i_key AS bytea[])))"
            )
        if shape.activities:
            found.append(
                f"(SELECT count(*) FROM {n.activities} AS a"
                " WHERE a.thread_no = head.thread_no) >= CAST(:needed AS bigint)"
            )
        return found

    def _guards_of_new(self) -> list[str]:
        """What must hold for a commit that makes its thread."""
        shape = self.shape
        found: list[str] = []
        if shape.expected:
            found.append("CAST(:expected AS text) = ''")
        if shape.start == "new":
            found.append(self._no_such_run())
        if self.reads_run or shape.answers or shape.claims:
            found.append("false")
        if shape.activities:
            found.append("CAST(:needed AS bigint) = 0")
        return found

    def _no_such_run(self) -> str:
        return f"NOT EXISTS (SELECT 1 FROM {self.n.runs} WHERE key = CAST(:run_key AS bytea))"

    # -- cut and head -------------------------------------------------------------

    def _cut(self) -> list[tuple[str, str]]:
        behind = (
            "e.thread_no = base.thread_no AND e.number > CAST(:keep AS bigint) AND e.cut IS NULL"
        )
        returns = "e.message_id = ANY (CAST(:returning AS text[]))"
        entries = self.n.entries
        found: list[tuple[str, str]] = []
        if not self.shape.archive or self.shape.tail:
            only = f" AND {returns}" if self.shape.archive else ""
            found.append(
                (
                    "gone",
                    f"(DELETE FROM {entries} AS e USING base WHERE {behind}{only}"
                    " RETURNING e.number)",
                )
            )
        if self.shape.archive:
            stays = f" AND {returns} IS NOT TRUE" if self.shape.tail else ""
            found.append(
                (
                    "archived",
                    f"(UPDATE {entries} AS e SET cut = base.version FROM base"
                    f" WHERE {behind}{stays} RETURNING e.number)",
                )
            )
        total = " + ".join(f"(SELECT count(*) FROM {name})" for name, _ in found)
        kept = "(SELECT count(*) FROM archived)" if self.shape.archive else "0"
        found += [
            ("cut", f"MATERIALIZED (SELECT {total} AS n_cut, {kept} AS kept)"),
            (
                "calc",
                "MATERIALIZED (SELECT base.*, cut.n_cut, cut.kept,"
                " CASE WHEN cut.n_cut = 0 THEN base.newest ELSE coalesce("
                f"(SELECT max(e.number) FROM {entries} AS e"
                " WHERE e.thread_no = base.thread_no AND e.number <= CAST(:keep AS bigint)"
                " AND e.cut IS NULL), 0) END AS left_newest,"
                f" CASE WHEN cut.n_cut > 0 OR {_COUNT} > 0 THEN base.version"
                " ELSE base.transcript_version END AS transcript FROM base CROSS JOIN cut)",
            ),
        ]
        return found

    def _head(self) -> list[tuple[str, str]]:
        marks = str(int(self.shape.start == "new"))
        if self.kept != "0":
            marks += " + CASE WHEN calc.kept > 0 THEN 2 ELSE 0 END"
        if self.shape.tail:
            newest = f"calc.next_number + {_COUNT} - 1"
            rest = f"calc.next_number || '-' || {newest}, {marks}"
        else:
            newest = "calc.left_newest"
            rest = f"'-', {marks}, calc.version - calc.transcript, {newest}"
        line = f"concat_ws(' ', CAST(:mark AS text), calc.version, {rest})"
        counters = {
            "version": "calc.version",
            "transcript_version": "calc.transcript",
            "next_number": f"calc.next_number + {_COUNT}",
            "newest": newest,
            "message_count": f"calc.message_count - calc.n_cut + {_COUNT}",
            "commits": (
                f"array_to_string(ARRAY[{line}] || "
                f"(string_to_array(calc.commits, chr(10)))[1 : {REMEMBERED - 1}], chr(10))"
            ),
            "updated_at": "calc.now",
        }
        columns = ", ".join((*_HEAD_VALUES, "incarnation", "created_at", *counters))
        given = (f"CAST(:t_{name} AS {_TYPES.get(name, 'text')})" for name in _HEAD_VALUES)
        values = ", ".join((*given, "calc.incarnation", "calc.now", *counters.values()))
        sets = ", ".join(f"{column} = {value}" for column, value in counters.items())
        returning = (
            "thread_no", "incarnation", "version", "transcript_version AS transcript", "newest",
            "next_number", "updated_at AS now",
        )  # fmt: skip
        born = (
            f"(INSERT INTO {self.n.threads} AS t ({columns}) SELECT {values} FROM calc"
            f" WHERE calc.thread_no IS NULL RETURNING {', '.join(f't.{r}' for r in returning)})"
        )
        moved = (
            f"(UPDATE {self.n.threads} AS t SET {sets} FROM calc"
            " WHERE t.thread_no = calc.thread_no"
            f" RETURNING {', '.join(f't.{r}' for r in returning)})"
        )
        if self.shape.head == "there":
            return [("done", moved)]
        if self.shape.head == "new":
            return [("done", born)]
        both = "(SELECT * FROM born UNION ALL SELECT * FROM moved)"
        return [("born", born), ("moved", moved), ("done", f"MATERIALIZED {both}")]

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
                    f" SELECT done.thread_no, done.next_number - {_COUNT} + m.place - 1, m.id,"
                    f" m.digest, m.body, NULL, {FORMAT_VERSION} FROM done CROSS JOIN unnest("
                    "CAST(:ids AS text[]), CAST(:digests AS bytea[]), CAST(:bodies AS text[]))"
                    " WITH ORDINALITY AS m(id, digest, body, place))",
                )
            )
        if self.kept != "0":
            found.append(
                (
                    "cut_record",
                    f"(INSERT INTO {n.cuts} (thread_no, cut, after, cut_at, run_id, extra, format)"
                    " SELECT done.thread_no, done.version, calc.left_newest, done.now,"
                    f" CAST(:cut_run_id AS text), 0, {FORMAT_VERSION} FROM done CROSS JOIN calc"
                    " WHERE calc.kept > 0)",
                )
            )
        if shape.start:
            found.append(("after_run", self._started()))
        elif shape.patch is not None:
            found.append(("after_run", self._patched()))
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
            found += self._shown()
        if shape.own_draft or shape.other_draft:
            run_no = (
                "(SELECT run_no FROM run)"
                if shape.own_draft
                else f"(SELECT run_no FROM {n.runs} WHERE key = CAST(:draft_key AS bytea))"
            )
            found.append(
                (
                    "undrafted",
                    f"(DELETE FROM {n.drafts} AS d USING done"
                    f" WHERE d.run_no = {run_no} AND d.thread_no = done.thread_no)",
                )
            )
        return found

    def _shown(self) -> list[tuple[str, str]]:
        activities = self.n.activities
        return [
            (
                "fewer",
                f"(DELETE FROM {activities} AS a USING done WHERE"
                " a.thread_no = done.thread_no AND a.position >= CAST(:length AS integer))",
            ),
            (
                "shown",
                f"(INSERT INTO {activities} (thread_no, position, body, format)"
                f" SELECT done.thread_no, m.position, m.body, {FORMAT_VERSION} FROM done"
                " CROSS JOIN unnest(CAST(:positions AS integer[]), CAST(:rows AS text[]))"
                " AS m(position, body) ON CONFLICT (thread_no, position)"
                " DO UPDATE SET body = excluded.body, format = excluded.format)",
            ),
        ]

    def _started(self) -> str:
        lease = (
            "CASE WHEN CAST(:s_lease_token AS text) IS NULL THEN NULL"
            " ELSE done.now + CAST(:lease_ms AS bigint) END"
        )
        if self.shape.start == "new":
            columns = ", ".join(("thread_no", *_START_VALUES, "lease_until", "format"))
            values = ", ".join(f"CAST(:s_{v} AS {_TYPES.get(v, 'text')})" for v in _START_VALUES)
            return (
                f"(INSERT INTO {self.n.runs} ({columns}) SELECT done.thread_no, {values}, {lease},"
                f" {FORMAT_VERSION} FROM done RETURNING {', '.join(RUN_COLUMNS)})"
            )
        hide = ", hide_from = CAST(:s_hide_from AS bigint)" if self.shape.hide else ""
        sets = f"lease_token = CAST(:s_lease_token AS text), lease_until = {lease}{hide}"
        return self._update_run(sets)

    def _patched(self) -> str:
        sets = [
            f"{name} = CAST(:p_{name} AS {_TYPES.get(name, 'text')})"
            for name in self.shape.patch or ()
        ]
        return self._update_run(", ".join(sets) or f"format = {FORMAT_VERSION}")

    def _update_run(self, sets: str) -> str:
        mine = ", ".join(f"r.{name}" for name in RUN_COLUMNS)
        return (
            f"(UPDATE {self.n.runs} AS r SET {sets} FROM done CROSS JOIN run"
            f" WHERE r.run_no = run.run_no RETURNING {mine})"
        )
