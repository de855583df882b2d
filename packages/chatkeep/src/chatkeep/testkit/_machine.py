"""The rules of the state machine: one call each, made on both sides and compared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from chatkeep.backends import Persistence
from chatkeep.errors import ChatkeepError
from chatkeep.records import UNSET, ActivityRecord, InterruptRecord, RunError, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import (
    ActivitiesWrite,
    CutAppend,
    InterruptAnswer,
    InterruptRef,
    RunStart,
    Splice,
    ThreadView,
    TurnCommit,
    TurnReceipt,
    ViewQuery,
)
from chatkeep.testkit._machine_sides import Failed, Pair, Side, plain_interrupt, plain_run

__all__ = ["Machine"]

# The first of each comes up most: calls must meet to show anything.
THREADS = ("t", "t", "t", "t:1", "subagent:r1")
RUNS = ("r1", "r1", "r2", "r3")
INTERRUPTS = ("i1", "i1", "i2")
T0 = 1_700_000_000_000

threads = st.sampled_from(THREADS)
runs = st.sampled_from(RUNS)
names = st.sampled_from(INTERRUPTS)
tokens = st.sampled_from((None, "a", "b"))
statuses = st.sampled_from(("running", "interrupted", "completed", "failed", "aborted"))
message_ids = st.sampled_from((None, "m1", "m2", "m3", "m4"))
texts = st.sampled_from(("", "x", "é\x00", "😀"))
values = st.sampled_from((None, 1, 1.0, True, "", {"a.b": [None]}, 2**70))
responses = st.sampled_from((None, UNSET, False, None, {"ok": [1.0]}))
leases = st.sampled_from((-1, 10**9))
"""Milliseconds: run out from the start, or far away. Nothing in between depends on a clock."""


def _row(name: str | None, role: str, text: str, extra: Any) -> dict[str, Any]:
    row: dict[str, Any] = {} if name is None else {"id": name}
    row |= {"role": role, "content": text}
    if extra is not None:
        row |= {"metadata": {"v": extra}, "x_new": [extra]}
    return row


messages = st.lists(
    st.builds(_row, message_ids, st.sampled_from(("user", "assistant")), texts, values), max_size=3
)

_ALL = ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)


class Machine(RuleBasedStateMachine):
    """Made concrete by :func:`chatkeep.testkit.state_machine.run_state_machine`."""

    def start(self) -> tuple[Pair, Callable[[Awaitable[Any]], Any]]:
        """Two empty sides, and what runs a coroutine."""
        raise NotImplementedError

    def count(self, what: str) -> None:
        """Note one ``examples`` or ``steps``."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.pair, self.run = self.start()
        self.started: list[tuple[str, str]] = []
        self.asked: list[tuple[str, str, str]] = []
        self.sent: list[tuple[str, tuple[TurnCommit, TurnCommit]]] = []
        self.deletes = 0
        self.count("examples")

    def driven(self, pick: int, thread: str, run: str) -> tuple[str, str]:
        """Mostly a run that was started; else the one given."""
        return (
            self.started[-1 - pick % len(self.started)] if self.started and pick else (thread, run)
        )

    def waiting(self, pick: int, thread: str, run: str, name: str) -> tuple[str, str, str]:
        """Mostly an interrupt that was created; else the one given."""
        return (
            self.asked[-1 - pick % len(self.asked)] if self.asked and pick else (thread, run, name)
        )

    # -- both sides -----------------------------------------------------------------

    def both(
        self,
        call: Callable[[Side], Awaitable[Any]],
        *,
        thread: str | None = None,
        show: Callable[[Side, Any], Any] | None = None,
        step: bool = True,
    ) -> list[Any]:
        """Make a call on both sides; results (or errors) and the thread must be equal."""
        if step:
            self.count("steps")
        return cast("list[Any]", self.run(self._both(call, thread, show)))

    async def _both(
        self,
        call: Callable[[Side], Awaitable[Any]],
        thread: str | None,
        show: Callable[[Side, Any], Any] | None,
    ) -> list[Any]:
        results: list[Any] = []
        for side in self.pair.sides:
            try:
                results.append(await call(side))
            except ChatkeepError as error:
                results.append(Failed(error))
        keys = [r.key if isinstance(r, Failed) else "ok" for r in results]
        assert keys[0] == keys[1], (
            f"model {results[0]!r} {keys[0]}, subject {results[1]!r} {keys[1]}"
        )
        if thread is not None:
            seen = [await self._look(side, thread) for side in self.pair.sides]
            assert seen[0] == seen[1]
        if keys[0] == "ok" and show is not None:
            shown = [show(s, r) for s, r in zip(self.pair.sides, results, strict=True)]
            assert repr(shown[0]) == repr(shown[1])
        return results

    async def _look(self, side: Side, thread: str) -> Any:
        view: ThreadView = await side.backend.read_view(thread, _ALL)
        side.learn(thread, view.numbers)
        return self._view(side, view)

    def _view(self, side: Side, view: ThreadView) -> dict[str, Any]:
        thread = view.thread_id
        assert view.numbers == sorted(set(view.numbers))
        return {
            "exists": view.exists,
            "revision": side.revision(thread, view.revision),
            "newest": side.rank(thread, view.newest),
            "messages": repr(view.messages),
            "numbers": [side.rank(thread, n) for n in view.numbers],
            "truncated": view.truncated,
            "foreign": view.foreign_run,
            "run": plain_run(view.run),
            "runs": [plain_run(r) for r in view.runs],
            "interrupts": repr([plain_interrupt(r) for r in view.interrupts]),
            "activities": repr([a.to_json() for a in view.activities]),
            "drafts": sorted((d.run_id, repr(d.messages)) for d in view.drafts),
        }

    def _receipt(self, side: Side, thread: str, receipt: TurnReceipt) -> dict[str, Any]:
        side.learn(thread, [*receipt.numbers, receipt.newest])
        return {
            "revision": side.revision(thread, receipt.revision),
            "newest": side.rank(thread, receipt.newest),
            "numbers": [side.rank(thread, n) for n in receipt.numbers],
            # Of a replayed commit the run may be shown as it was then or as it is now.
            "run": receipt.run
            and (receipt.run.run_id if receipt.replayed else plain_run(receipt.run)),
            "created": receipt.created_run,
            "cut": receipt.cut_id is not None,
            "replayed": receipt.replayed,
        }

    def commit(self, thread: str, make: Callable[[Side, str], TurnCommit]) -> None:
        """Send a commit of the same meaning to both sides, and remember it."""
        commit_id = new_commit_id()
        pair = tuple(make(side, commit_id) for side in self.pair.sides)
        self.sent.append((thread, cast("tuple[TurnCommit, TurnCommit]", pair)))
        self._send(thread, cast("tuple[TurnCommit, TurnCommit]", pair))

    def _send(self, thread: str, commits: tuple[TurnCommit, TurnCommit]) -> None:
        def call(side: Side) -> Awaitable[Any]:
            return cast(
                "Awaitable[Any]", side.backend.commit_turn(commits[self.pair.sides.index(side)])
            )

        self.both(call, thread=thread, show=lambda s, r: self._receipt(s, thread, r))

    # -- transcripts ------------------------------------------------------------------

    @rule(thread=threads, rows=messages, more=messages)
    def save_thread(self, thread: str, rows: list[Any], more: list[Any]) -> None:
        self.both(lambda s: s.stores.messages.save_thread(thread, [*rows, *more]), thread=thread)

    @rule(thread=threads, keep=st.integers(-1, 6), rows=messages, back=st.integers(0, 5))
    def splice_thread(self, thread: str, keep: int, rows: list[Any], back: int) -> None:
        self.both(
            lambda s: s.stores.messages.splice_thread(
                thread, keep=keep, tail=rows, expected=s.at(thread, back // 4)
            ),
            thread=thread,
            show=lambda s, r: (s.revision(thread, r.revision), s.ranks(thread, r.numbers)),
        )

    @rule(
        thread=threads,
        rank=st.integers(0, 8),
        rows=messages,
        back=st.integers(-1, 3),
        archive=st.sampled_from((True, True, True, False)),
    )
    def commit_splice(
        self, thread: str, rank: int, rows: list[Any], back: int, archive: bool
    ) -> None:
        self.commit(
            thread,
            lambda s, c: TurnCommit(
                commit_id=c,
                thread_id=thread,
                splice=Splice(
                    keep_through=s.number(thread, rank),
                    tail=rows,
                    expected=None if back < 0 else s.at(thread, back // 3),
                    archive=archive,
                ),
            ),
        )

    def _cuts(self, thread: str, *, step: bool) -> None:
        async def call(side: Side) -> list[Any]:
            cuts = await side.stores.messages.list_cuts(thread)
            side.cuts[thread] = [cut.cut_id for cut in cuts]
            bodies = [await side.stores.messages.load_cut(thread, cut.cut_id) for cut in cuts]
            for cut in cuts:
                side.learn(thread, cut.numbers)
            return list(zip(cuts, bodies, strict=True))

        def show(side: Side, rows: list[Any]) -> list[Any]:
            return [
                (
                    [side.rank(thread, n) for n in cut.numbers],
                    cut.message_ids,
                    cut.run_id,
                    cut.extra,
                    bodies,
                )
                for cut, bodies in rows
            ]

        self.both(call, show=show, step=step)

    @rule(
        thread=threads,
        what=st.sampled_from(("restore", "restore", "append", "purge", "erase")),
        index=st.integers(0, 4),
        back=st.integers(0, 4),
        run=runs,
        rows=messages,
    )
    def cuts(
        self, thread: str, what: str, index: int, back: int, run: str, rows: list[Any]
    ) -> None:
        self._cuts(thread, step=False)
        if what == "append":
            self.commit(
                thread,
                lambda s, c: TurnCommit(
                    commit_id=c,
                    thread_id=thread,
                    run_id=run,
                    cut_append=CutAppend(cut_id=s.cut(thread, index), messages=rows),
                ),
            )
        else:
            calls: dict[str, Callable[[Side], Awaitable[Any]]] = {
                "restore": lambda s: s.stores.messages.restore_cut(
                    thread, s.cut(thread, index), expected=s.at(thread, back // 4)
                ),
                "purge": lambda s: s.stores.messages.purge_cuts(
                    thread, before=0 if index else 2**53
                ),
                "erase": lambda s: s.persistence.erase_messages(thread, [f"m{index}"]),
            }
            self.both(
                calls[what],
                thread=thread,
                show=lambda s, r: r if isinstance(r, int) else s.revision(thread, r.revision),
            )
        self._cuts(thread, step=False)

    # -- runs ---------------------------------------------------------------------------

    @rule(
        thread=threads,
        run=runs,
        at=st.integers(0, 2),
        status=st.sampled_from(("running", "running", "running", "interrupted", "completed")),
        token=tokens,
        ms=leases,
    )
    def create_or_resume(
        self, thread: str, run: str, at: int, status: Any, token: str | None, ms: int
    ) -> None:
        self.started.append((thread, run))
        self.both(
            lambda s: s.stores.runs.create_or_resume(
                run,
                thread,
                started_at=T0 + at,
                status=status,
                parent_run_id="r1" if run == "r2" else None,
                lease_token=token,
                lease_ms=ms,
            ),
            thread=thread,
            show=lambda _, r: plain_run(r),
        )

    @rule(
        pick=st.integers(0, 3),
        asked=st.integers(0, 3),
        claim=st.booleans(),
        thread=threads,
        run=runs,
        name=names,
        token=tokens,
        ms=leases,
    )
    def start_run(
        self,
        pick: int,
        asked: int,
        claim: bool,
        thread: str,
        run: str,
        name: str,
        token: str | None,
        ms: int,
    ) -> None:
        thread, run = self.driven(pick // 2, thread, run)
        if claim:
            thread, _, name = self.waiting(asked, thread, run, name)
        self.started.append((thread, run))
        self.commit(
            thread,
            lambda _, c: TurnCommit(
                commit_id=c,
                thread_id=thread,
                run_id=run,
                claims=[InterruptRef(interrupt_id=name)] if claim else [],
                run=RunStart(run_id=run, started_at=T0, lease_token=token, lease_ms=ms),
            ),
        )

    @rule(
        pick=st.integers(0, 3),
        run=runs,
        thread=threads,
        bare=st.booleans(),
        status=st.none() | statuses,
        usage=st.sampled_from((UNSET, None, {"n": 1}, {"n": 2.0})),
        lost=st.booleans(),
        token=tokens,
    )
    def update_run(
        self,
        pick: int,
        run: str,
        thread: str,
        bare: bool,
        status: Any,
        usage: Any,
        lost: bool,
        token: str | None,
    ) -> None:
        thread, run = self.driven(pick, thread, run)
        patch = RunPatch(
            status=UNSET if status is None else status,
            usage=usage,
            error=RunError(message="lost", code="worker_lost") if lost else UNSET,
            extra={"mark": 1} if lost else {},
        )
        self.both(
            lambda s: s.stores.runs.update(
                run, patch, thread_id=None if bare else thread, lease_token=token
            ),
            thread=thread,
        )

    @rule(
        pick=st.integers(0, 3),
        thread=threads,
        run=runs,
        rows=messages,
        token=tokens,
        ms=leases,
        draft=st.booleans(),
    )
    def drive(
        self,
        pick: int,
        thread: str,
        run: str,
        rows: list[Any],
        token: str | None,
        ms: int,
        draft: bool,
    ) -> None:
        thread, run = self.driven(pick, thread, run)
        if draft:
            self.both(
                lambda s: s.backend.save_draft(thread, run, rows, lease_token=token),
                thread=thread,
            )
        else:
            self.both(
                lambda s: s.backend.renew_lease(thread, run, token or "c", ms),
                thread=thread,
                show=lambda _, r: plain_run(r),
            )

    # -- interrupts -----------------------------------------------------------------------

    @rule(thread=threads, run=runs, name=names, at=st.integers(0, 1), value=values)
    def create_interrupt(self, thread: str, run: str, name: str, at: int, value: Any) -> None:
        self.asked.append((thread, run, name))
        record = InterruptRecord(
            interrupt_id=name,
            run_id=run,
            thread_id=thread,
            requested_at=T0 + at,
            payload={"v": value},
        )
        self.both(lambda s: s.stores.interrupts.create(record), thread=thread, show=lambda _, r: r)

    @rule(
        pick=st.integers(0, 3),
        thread=threads,
        name=names,
        run=runs,
        bare=st.booleans(),
        value=responses,
        yes=st.booleans(),
    )
    def settle(
        self, pick: int, thread: str, name: str, run: str, bare: bool, value: Any, yes: bool
    ) -> None:
        thread, run, name = self.waiting(pick, thread, run, name)
        run_id = None if bare else run

        def call(side: Side) -> Awaitable[Any]:
            store = side.stores.interrupts
            if yes:
                return cast("Awaitable[Any]", store.resolve(thread, name, value, run_id=run_id))
            return cast("Awaitable[Any]", store.cancel(thread, name, run_id=run_id))

        self.both(call, thread=thread)

    @rule(thread=threads, wanted=st.lists(st.tuples(names, st.none() | runs), max_size=3))
    def commit_batch(self, thread: str, wanted: list[tuple[str, str | None]]) -> None:
        answers = [InterruptAnswer(interrupt_id=n, run_id=r, response=n) for n, r in wanted]
        self.both(lambda s: s.stores.interrupts.commit_batch(thread, answers), thread=thread)

    # -- whole boundaries -------------------------------------------------------------------

    @rule(
        pick=st.integers(0, 3),
        thread=threads,
        run=runs,
        token=tokens,
        rows=messages,
        back=st.integers(0, 4),
        answer=st.none() | names,
        ask=st.none() | names,
        status=st.none() | statuses,
        card=st.none() | st.integers(0, 2),
        drop=st.booleans(),
    )
    def commit_boundary(
        self,
        pick: int,
        thread: str,
        run: str,
        token: str | None,
        rows: list[Any],
        back: int,
        answer: str | None,
        ask: str | None,
        status: Any,
        card: int | None,
        drop: bool,
    ) -> None:
        thread, run = self.driven(pick, thread, run)
        if ask is not None:
            self.asked.append((thread, run, ask))
        asked = [
            InterruptRecord(
                interrupt_id=name, run_id=run, thread_id=thread, requested_at=T0, payload={}
            )
            for name in (ask,)
            if name is not None
        ]
        cards = (
            None
            if card is None
            else ActivitiesWrite(puts={i: _card(i, run) for i in range(card)}, length=card)
        )

        def make(side: Side, commit_id: str) -> TurnCommit:
            return TurnCommit(
                commit_id=commit_id,
                thread_id=thread,
                run_id=run,
                lease_token=token,
                splice=Splice(
                    keep_through=side.number(thread, -1),
                    tail=rows,
                    expected=side.at(thread, back // 4),
                ),
                answers=[] if answer is None else [InterruptAnswer(interrupt_id=answer)],
                interrupts=asked,
                run=None if status is None else RunPatch(status=status, finished_at=T0 + 9),
                activities=cards,
                drop_draft=drop,
            )

        self.commit(thread, make)

    @precondition(lambda self: bool(getattr(self, "sent", None)))
    @rule(back=st.integers(1, 12))
    def send_again(self, back: int) -> None:
        thread, commits = self.sent[-min(back, len(self.sent))]
        self._send(thread, commits)

    # -- activities, metadata, threads ------------------------------------------------------

    @rule(thread=threads, count=st.integers(0, 3), value=st.sampled_from(RUNS))
    def save_activities(self, thread: str, count: int, value: str) -> None:
        rows = [_card(i, value) for i in range(count)]
        self.both(lambda s: s.stores.activities.save_activities(thread, rows), thread=thread)

    @rule(
        what=st.sampled_from(("set", "set", "if", "if", "delete")),
        key=st.sampled_from(("k", "k", "", "t", "t:1")),
        value=values,
        back=st.integers(0, 3),
    )
    def metadata(self, what: str, key: str, value: Any, back: int) -> None:
        calls: dict[str, Callable[[Side], Awaitable[Any]]] = {
            "set": lambda s: s.stores.metadata.set("n", key, value),
            "if": lambda s: s.stores.metadata.set_if(
                "n", key, value, s.metadata[-1 - back % len(s.metadata)]
            ),
            "delete": lambda s: s.stores.metadata.delete("n", key),
        }
        self.both(calls[what], show=lambda s, r: r is not None and _known(s.metadata, r))
        self.both(
            lambda s: s.stores.metadata.get_versioned("n", key),
            show=lambda s, r: r and (r.value, _known(s.metadata, r.revision)),
            step=False,
        )

    @precondition(lambda self: getattr(self, "deletes", 9) < 2 and len(self.sent) > 5)
    @rule(thread=threads)
    def delete_thread(self, thread: str) -> None:
        self.deletes += 1
        self.both(lambda s: s.persistence.delete_thread(thread), thread=thread, show=lambda _, r: r)
        for side in self.pair.sides:
            # Numbers belong to one incarnation of a thread; revisions to all of them.
            side.numbers.clear()
            side.cuts.clear()
        self.sent.clear()
        self.both(lambda s: s.stores.metadata.get("n", thread), show=lambda _, r: r, step=False)

    @rule(
        what=st.sampled_from(("page", "page", "runs", "interrupt", "threads", "export")),
        thread=threads,
        run=runs,
        name=names,
        limit=st.integers(0, 4),
        rank=st.integers(-1, 8),
        flag=st.booleans(),
    )
    def look(
        self, what: str, thread: str, run: str, name: str, limit: int, rank: int, flag: bool
    ) -> None:
        """The reads that a view does not cover."""
        if what == "page":
            self.both(
                lambda s: s.stores.messages.load_page(
                    thread, limit=limit, before=None if rank < 0 else s.number(thread, rank)
                ),
                show=lambda s, p: (
                    p.messages,
                    s.ranks(thread, p.numbers),
                    p.truncated,
                    p.cursor is not None and s.rank(thread, p.cursor),
                ),
            )
        elif what == "runs":
            self.both(
                lambda s: _runs_of(s, thread, run),
                show=lambda _, found: [plain_run(r) for r in found],
            )
        elif what == "interrupt":
            self.both(
                lambda s: s.stores.interrupts.get(thread, name, run_id=run if flag else None),
                show=lambda _, r: r and plain_interrupt(r),
            )
        elif what == "threads":
            self.both(
                lambda s: _every_thread(s.persistence, max(limit, 1), children=flag),
                show=lambda _, rows: rows,
            )
        else:
            self.both(
                lambda s: s.persistence.export_thread(thread),
                show=lambda _, e: (
                    e
                    and (
                        e.messages,
                        e.metadata,
                        [c.thread_id for c in e.children],
                        list(e.cuts.values()),
                        [r.run_id for r in e.runs],
                    )
                ),
            )


async def _runs_of(side: Side, thread: str, run: str) -> list[Any]:
    store = side.stores.runs
    children = await store.list_by_parent_runs([run, "r1"])
    return [
        await store.get(run),
        await store.get(run, thread_id=thread),
        await store.find_active_run(thread),
        *children[run],
        *children["r1"],
    ]


async def _every_thread(persistence: Persistence, limit: int, *, children: bool) -> list[Any]:
    rows: list[Any] = []
    cursor: str | None = None
    while True:
        page = await persistence.list_threads(limit=limit, cursor=cursor, children=children)
        rows += [(info.thread_id, info.message_count) for info in page.threads]
        cursor = page.cursor
        if cursor is None:
            # Two writes of one millisecond have no order that both sides would know.
            assert len(rows) == len(set(rows))
            return sorted(rows)


def _card(index: int, mark: str) -> ActivityRecord:
    return ActivityRecord(id=f"a{index}", activity_type="card", content={"m": mark}, index=index)


def _known(seen: list[Any], token: Any) -> int:
    if token not in seen:
        seen.append(token)
    return seen.index(token)
