"""The suite can fail: broken backends, and the cases that must find each of them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from chatkeep import Persistence, _memory, memory, memory_persistence
from chatkeep.backends import Backend
from chatkeep.codec import JsonValue, decode, encode
from chatkeep.compose import compose_persistence, define_activity_store, define_message_store
from chatkeep.errors import ChatkeepError, InterruptConflict
from chatkeep.memory import MemoryBackend
from chatkeep.records import UNSET, ActivityRecord, InterruptRecord, ModelMessage, RunRecord
from chatkeep.rules import encode_messages
from chatkeep.scope import EMPTY_SCOPE
from chatkeep.stores import TurnCommit, TurnReceipt, VersionedValue, ViewQuery
from chatkeep.testkit import conformance as c
from chatkeep.testkit.conformance._listed import ListedWrites
from chatkeep.testkit.faults import FaultyBackend
from chatkeep.testkit.state_machine import run_state_machine
from conformance.bags import bag

pytestmark = [pytest.mark.anyio, pytest.mark.memory]

Mutant = Callable[[pytest.MonkeyPatch], Persistence]
Case = tuple[Callable[..., Awaitable[None]], dict[str, Any]]

_STORE_OF = {
    "revisioned": "messages",
    "paged": "messages",
    "cuts": "messages",
    "history": "runs",
    "tree": "runs",
    "reclaimable": "runs",
    "batch": "interrupts",
    "versioned": "metadata",
}


async def run_case(case: Callable[..., Awaitable[None]], persistence: Any, **given: Any) -> None:
    """Call a case with the fixtures that it names."""
    stores, arguments = persistence.stores, dict(given)
    for name in inspect.signature(case).parameters:
        if name in arguments or name == "self":
            continue
        if name == "ids":
            arguments[name] = c.Ids()
        elif name in ("persistence", "admin"):
            arguments[name] = persistence
        elif name == "write":
            arguments[name] = ListedWrites(persistence, c.Ids())
        elif name == "maintenance":
            arguments[name] = persistence.maintenance()
        elif name == "scoped":
            arguments[name] = persistence.scoped
        elif name == "backend":
            arguments[name] = stores.messages.backend
        elif name == "views":
            arguments[name] = _views(persistence)
        elif name == "declared":
            arguments[name] = frozenset()
        else:
            arguments[name] = getattr(stores, _STORE_OF.get(name, name))
    owner = getattr(c, case.__qualname__.partition(".")[0])
    await case(owner(), **arguments)


def _views(persistence: Any) -> dict[str, Any]:
    fixture = inspect.unwrap(c.TestScope.views)
    function = getattr(fixture, "_get_wrapped_function", lambda: fixture)()
    views: dict[str, Any] = function(c.TestScope(), persistence, persistence.scoped, c.Ids())
    return views


# ------------------------------------------------------------------------------- mutants


def overwrites_settled_interrupts(patch: pytest.MonkeyPatch) -> Persistence:
    def settle(record: Any, answer: Any, *, now: int, **_: Any) -> InterruptRecord:
        if record is None:
            raise InterruptConflict("t", [answer.interrupt_id], "does not exist")
        update = {"status": answer.status, "resolved_at": now, "response": answer.response}
        return record.model_copy(update=update)

    patch.setattr(_memory, "settle_interrupt", settle)
    return memory_persistence()


def loses_the_order_of_equal_times(patch: pytest.MonkeyPatch) -> Persistence:
    def by_id(self: Any) -> list[InterruptRecord]:
        return sorted(self.interrupts.values(), key=lambda r: (r.requested_at, r.interrupt_id))

    def runs_by_id(runs: Any) -> list[RunRecord]:
        ordered = sorted(runs, key=lambda run: (run.record.started_at, run.record.run_id))
        return [run.record for run in ordered]

    patch.setattr(_memory.Thread, "interrupts_in_order", by_id)
    patch.setattr(_memory, "in_order", runs_by_id)
    patch.setattr(memory, "in_order", runs_by_id)
    return memory_persistence()


def reuses_revisions(patch: pytest.MonkeyPatch) -> Persistence:
    patch.setattr(_memory, "new_revision", str)
    patch.setattr(memory, "new_revision", lambda _: "1")
    return memory_persistence()


def reuses_numbers(patch: pytest.MonkeyPatch) -> Persistence:
    write = _memory._append

    def append(thread: Any, entries: Any) -> list[int]:
        thread.next = (thread.live[-1] if thread.live else 0) + 1
        return write(thread, entries)

    patch.setattr(_memory, "_append", append)
    return memory_persistence()


class _JoinsKeys(MemoryBackend):
    """Metadata under one text."""

    async def _metadata_get(self, namespace: str, key: str) -> VersionedValue | None:
        return await super()._metadata_get("all", f"{namespace}:{key}")

    async def _metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        return await super()._metadata_put("all", f"{namespace}:{key}", value, expected)

    async def _metadata_delete(self, namespace: str, key: str) -> None:
        await super()._metadata_delete("all", f"{namespace}:{key}")


def joins_metadata_keys(_: pytest.MonkeyPatch) -> Persistence:
    return _JoinsKeys().persistence()


def ignores_the_expected_revision(patch: pytest.MonkeyPatch) -> Persistence:
    patch.setattr(memory, "check_revision", lambda *_: None)
    patch.setattr("chatkeep._facade.ThreadConflict", _Never)
    return memory_persistence()


class _Never(Exception):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__("not raised by anybody")


def drops_unknown_keys(patch: pytest.MonkeyPatch) -> Persistence:
    known = set(ModelMessage.__annotations__)

    def dropping(messages: Sequence[Any], what: str = "messages") -> Any:
        kept = [{k: v for k, v in m.items() if k in known} for m in messages]
        return encode_messages(kept, what)  # type: ignore[arg-type]

    patch.setattr(memory, "encode_messages", dropping)
    return memory_persistence()


def turns_absent_into_null(patch: pytest.MonkeyPatch) -> Persistence:
    def filling(messages: Sequence[Any], what: str = "messages") -> Any:
        return encode_messages([{"name": None, **m} for m in messages], what)  # type: ignore[list-item]

    patch.setattr(memory, "encode_messages", filling)
    return memory_persistence()


def applies_a_replayed_commit_twice(patch: pytest.MonkeyPatch) -> Persistence:
    patch.setattr(memory, "_RECENT_COMMITS", 0)
    return memory_persistence()


def remembers_only_the_last_commit(patch: pytest.MonkeyPatch) -> Persistence:
    patch.setattr(memory, "_RECENT_COMMITS", 1)
    return memory_persistence()


class _WritesFirst(MemoryBackend):
    """The transcript is written before the rest is judged."""

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        if commit.splice is not None and (commit.run or commit.answers or commit.claims):
            apart = TurnCommit(
                commit_id=f"{commit.commit_id}-1",
                thread_id=commit.thread_id,
                splice=commit.splice,
            )
            first = await super()._commit_turn(apart)
            rest = await super()._commit_turn(replace(commit, splice=None))
            return replace(rest, numbers=first.numbers, cut_id=first.cut_id)
        return await super()._commit_turn(commit)


def writes_before_it_checks(_: pytest.MonkeyPatch) -> Persistence:
    return _WritesFirst().persistence()


def lets_any_driver_write(patch: pytest.MonkeyPatch) -> Persistence:
    patch.setattr(memory, "check_driver", lambda *_: None)
    return memory_persistence()


def revives_ended_runs(patch: pytest.MonkeyPatch) -> Persistence:
    real = memory.start_run

    def start(stored: Any, thread_id: str, start: Any, now: int) -> RunRecord:
        if stored is not None and stored.terminal and stored.thread_id == thread_id:
            stored = stored.model_copy(update={"status": "interrupted"})
        return real(stored, thread_id, start, now)

    patch.setattr(memory, "start_run", start)
    return memory_persistence()


class _SharesRuns(MemoryBackend):
    def _decide_run(self, scope: Any, thread: Any, commit: TurnCommit, now: int) -> Any:
        mine = {r: t for r, t in scope.thread_of.items() if t == commit.thread_id}
        own = _memory.ScopeData(threads=scope.threads, thread_of=mine)
        return super()._decide_run(own, thread, commit, now)


def shares_run_ids_between_threads(_: pytest.MonkeyPatch) -> Persistence:
    return _SharesRuns().persistence()


def changes_the_status_of_ended_runs(patch: pytest.MonkeyPatch) -> Persistence:
    patch.setattr("chatkeep.rules.check_transition", lambda *_, **__: None)
    return memory_persistence()


def ignores_claims(patch: pytest.MonkeyPatch) -> Persistence:
    def claim(record: Any, *_: Any, run_id: str, **__: Any) -> InterruptRecord:
        if record is None:
            raise InterruptConflict("t", ["?"], "does not exist")
        return record.model_copy(update={"claimed_by": run_id})

    patch.setattr(_memory, "claim_interrupt", claim)
    return memory_persistence()


def never_frees_a_claim(patch: pytest.MonkeyPatch) -> Persistence:
    patch.setattr(_memory.Thread, "is_live", lambda *_: True)
    return memory_persistence()


class _OneScope(MemoryBackend):
    @property
    def _mine(self) -> Any:
        return self._state.of(EMPTY_SCOPE)


def knows_one_scope(_: pytest.MonkeyPatch) -> Persistence:
    return _OneScope().persistence()


def archives_nothing(patch: pytest.MonkeyPatch) -> Persistence:
    real = _memory.split_cut
    patch.setattr(_memory, "split_cut", lambda cut, tail, **_: real(cut, tail, archive=False))
    return memory_persistence()


def archives_replacements(patch: pytest.MonkeyPatch) -> Persistence:
    real = _memory.split_cut
    patch.setattr(_memory, "split_cut", lambda cut, _, **options: real(cut, [], **options))
    return memory_persistence()


class _DeleteForgets(MemoryBackend):
    async def _delete_thread(self, thread_id: str) -> bool:
        kept = dict(self._mine.metadata)
        found = await super()._delete_thread(thread_id)
        self._mine.metadata.update(kept)
        return found


def delete_misses_metadata(_: pytest.MonkeyPatch) -> Persistence:
    return _DeleteForgets().persistence()


class _DeletesByPrefix(MemoryBackend):
    async def _delete_thread(self, thread_id: str) -> bool:
        names = [t for t in self._mine.threads if t.startswith(thread_id)]
        return any([await super(_DeletesByPrefix, self)._delete_thread(t) for t in names])


def deletes_by_prefix(_: pytest.MonkeyPatch) -> Persistence:
    return _DeletesByPrefix().persistence()


def pages_overlap(patch: pytest.MonkeyPatch) -> Persistence:
    real = memory.window

    def window(live: list[int], query: ViewQuery) -> Any:
        before = None if query.before is None else query.before + 1
        return real(live, replace(query, before=before))

    patch.setattr(memory, "window", window)
    return memory_persistence()


def drafts_move_the_revision(patch: pytest.MonkeyPatch) -> Persistence:
    class Moving(MemoryBackend):
        async def _save_draft(self, thread_id: str, *rest: Any) -> None:
            await super()._save_draft(thread_id, *rest)
            self._mine.threads[thread_id].revision += "+"

    return Moving().persistence()


def keeps_the_callers_objects(patch: pytest.MonkeyPatch) -> Persistence:
    stored: dict[bytes, Any] = {}

    def message_of(entry: Any) -> Any:
        return stored.setdefault(entry.body, decode(entry.body))

    patch.setattr(_memory, "message_of", message_of)
    patch.setattr(memory, "message_of", message_of)
    return memory_persistence()


def takes_null_for_absent(patch: pytest.MonkeyPatch) -> Persistence:
    real = _memory.settle_interrupt

    def settle(record: Any, answer: Any, **options: Any) -> InterruptRecord:
        done = real(record, answer, **options)
        if done.response is None:
            return done.model_copy(update={"response": UNSET})
        return done

    patch.setattr(_memory, "settle_interrupt", settle)
    return memory_persistence()


def counts_time_in_seconds(patch: pytest.MonkeyPatch) -> Persistence:
    return memory_persistence(clock=lambda: int(time.time()))


def merges_on_save(_: pytest.MonkeyPatch) -> Persistence:
    bodies: dict[str, bytes] = {}

    async def load_thread(thread_id: str) -> Any:
        return decode(bodies.get(thread_id, b"[]"))

    async def save_thread(thread_id: str, messages: Any) -> None:
        old = await load_thread(thread_id)
        known = [m.get("id") for m in messages]
        kept = [m for m in old if m.get("id") not in known]
        bodies[thread_id] = encode([*kept, *messages])

    store = define_message_store(load_thread=load_thread, save_thread=save_thread)
    return compose_persistence(memory_persistence(), overrides={"messages": store})


def sorts_activities(_: pytest.MonkeyPatch) -> Persistence:
    rows: dict[str, list[Any]] = {}

    async def load_activities(thread_id: str) -> Any:
        return sorted(rows.get(thread_id, []), key=lambda row: (row.index, row.id))

    async def save_activities(thread_id: str, activities: Any) -> None:
        rows[thread_id] = list(activities)

    store = define_activity_store(load_activities=load_activities, save_activities=save_activities)
    return compose_persistence(memory_persistence(), overrides={"activities": store})


def keeps_known_columns_of_activities(_: pytest.MonkeyPatch) -> Persistence:
    rows: dict[str, list[Any]] = {}
    columns = ("id", "activity_type", "content", "index", "metadata")

    async def load_activities(thread_id: str) -> Any:
        return [ActivityRecord(**row) for row in rows.get(thread_id, [])]

    async def save_activities(thread_id: str, activities: Any) -> None:
        rows[thread_id] = [{name: getattr(a, name) for name in columns} for a in activities]

    store = define_activity_store(load_activities=load_activities, save_activities=save_activities)
    return compose_persistence(memory_persistence(), overrides={"activities": store})


def lists_by_creation(patch: pytest.MonkeyPatch) -> Persistence:
    class Listing(MemoryBackend):
        async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
            receipt = await super()._commit_turn(commit)
            thread = self._mine.threads[commit.thread_id]
            thread.updated_at = thread.created_at
            return receipt

    return Listing().persistence()


def sweeps_runs_that_are_driven(patch: pytest.MonkeyPatch) -> Persistence:
    class Sweeping(MemoryBackend):
        async def _list_lost(self, limit: int) -> Any:
            rows = self._scan(list(self._state.scopes), lambda r: r.started_at, limit)
            return [r for r in rows if r.run.lease is not None]

    real = memory.check_driver
    patch.setattr(RunRecord, "live", lambda *_: False)
    patch.setattr(
        memory,
        "check_driver",
        lambda commit, run, now: real(replace(commit, lease_expired=False), run, now),
    )
    return Sweeping().persistence()


_MUTANTS: dict[Mutant, list[Case]] = {
    overwrites_settled_interrupts: [
        (c.TestInterrupts.test_a_settled_record_never_changes, {}),
        (c.TestInterrupts.test_of_two_answers_at_once_one_wins, {}),
        (c.TestBatchCommit.test_one_bad_entry_refuses_the_whole_batch, {"fault": "settled"}),
        (c.TestCommits.test_a_refused_commit_writes_nothing, {"fault": "settled answer"}),
        (c.TestClaims.test_only_the_claiming_run_answers_while_it_lives, {}),
    ],
    loses_the_order_of_equal_times: [
        (c.TestInterrupts.test_equal_times_keep_the_order_of_insertion, {}),
        (c.TestRuns.test_of_runs_started_together_the_last_created_is_active, {}),
        (c.TestRunHistory.test_runs_started_together_keep_the_order_of_creation, {}),
        (c.TestRunTree.test_children_started_together_keep_the_order_of_creation, {}),
    ],
    reuses_revisions: [
        (c.TestThreadAdmin.test_a_recreated_thread_starts_anew, {}),
        (c.TestVersionedMetadata.test_a_revision_never_returns_after_a_delete, {}),
        (c.TestVersionedMetadata.test_a_plain_set_changes_the_revision, {}),
    ],
    reuses_numbers: [
        (c.TestRevisionedMessages.test_a_splice_keeps_the_front_and_replaces_the_rest, {}),
        (c.TestRevisionedMessages.test_numbers_and_revisions_are_never_used_twice, {}),
        (c.TestRevisionedMessages.test_an_emptied_thread_still_remembers_its_numbers, {}),
        (c.TestCutArchive.test_nothing_is_ever_lost_by_cutting_and_restoring, {}),
    ],
    joins_metadata_keys: [
        (c.TestMetadata.test_d1_namespace_and_key_are_never_joined, {}),
        (c.TestThreadAdmin.test_delete_removes_every_kind_of_record, {}),
    ],
    ignores_the_expected_revision: [
        (c.TestRevisionedMessages.test_of_two_tabs_one_wins_and_the_other_is_told, {}),
        (c.TestCutArchive.test_a_restore_on_another_revision_changes_nothing, {}),
        (c.TestCommits.test_a_refused_commit_writes_nothing, {"fault": "revision"}),
    ],
    drops_unknown_keys: [
        (c.TestMessages.test_each_message_shape_round_trips_exactly, {"shape": "unknown keys"}),
        (c.TestMessages.test_m2_rich_shapes_round_trip_together, {}),
    ],
    turns_absent_into_null: [
        (c.TestMessages.test_m1_what_was_saved_loads_equal_and_in_order, {}),
        (c.TestMessages.test_each_message_shape_round_trips_exactly, {"shape": "tool result"}),
    ],
    applies_a_replayed_commit_twice: [
        (c.TestCommits.test_a_commit_sent_again_is_applied_once, {}),
        (c.TestCommits.test_a_commit_sent_twice_at_once_is_applied_once, {}),
        (c.TestConcurrency.test_a_cancelled_commit_is_known_or_unknown_whole, {}),
    ],
    remembers_only_the_last_commit: [
        (c.TestCommits.test_a_commit_is_known_after_fifteen_others, {}),
    ],
    writes_before_it_checks: [
        (c.TestCommits.test_a_refused_commit_writes_nothing, {"fault": "terminal run"}),
        (c.TestCommits.test_a_refused_commit_writes_nothing, {"fault": "claimed answer"}),
        (c.TestLeases.test_two_threads_never_start_one_run_id, {}),
    ],
    lets_any_driver_write: [
        (c.TestLeases.test_a_driver_that_lost_its_lease_writes_nothing, {}),
        (c.TestLeases.test_a_sweep_commit_demands_an_expired_lease, {}),
        (c.TestRuns.test_an_update_with_a_wrong_token_writes_nothing, {}),
        (c.TestCommits.test_refusals_come_in_the_order_promised, {}),
    ],
    revives_ended_runs: [
        (
            c.TestLeases.test_who_may_start_a_known_run,
            {"status": "completed", "lease_ms": 60_000, "reason": "terminal"},
        ),
        (c.TestCommits.test_a_refused_commit_writes_nothing, {"fault": "terminal run"}),
    ],
    shares_run_ids_between_threads: [
        (c.TestRuns.test_two_threads_never_own_one_run_id, {}),
        (c.TestLeases.test_two_threads_never_start_one_run_id, {}),
    ],
    changes_the_status_of_ended_runs: [
        (
            c.TestRuns.test_statuses_change_as_the_state_machine_says,
            {"before": "completed", "after": "running"},
        ),
        (c.TestRuns.test_of_two_terminal_writes_one_wins, {}),
    ],
    ignores_claims: [
        (c.TestClaims.test_of_two_claims_one_wins, {}),
        (c.TestCommits.test_a_refused_commit_writes_nothing, {"fault": "settled claim"}),
    ],
    never_frees_a_claim: [
        (c.TestClaims.test_a_claim_ends_with_its_run, {"end": "aborted"}),
        (c.TestClaims.test_a_claim_ends_with_its_run, {"end": "expired"}),
        (c.TestClaims.test_the_claim_of_a_dead_run_stops_nobody, {}),
    ],
    knows_one_scope: [
        (c.TestScope.test_messages_of_scopes_never_meet, {}),
        (c.TestScope.test_revisions_pages_and_cuts_of_scopes_never_meet, {}),
        (c.TestScope.test_runs_of_scopes_never_meet, {}),
        (c.TestScope.test_an_update_reaches_no_other_scope, {}),
        (c.TestScope.test_lists_of_runs_show_one_scope, {}),
        (c.TestScope.test_interrupts_of_scopes_never_meet, {}),
        (c.TestScope.test_a_batch_reaches_no_other_scope, {}),
        (c.TestScope.test_activities_of_scopes_never_meet, {}),
        (c.TestScope.test_metadata_of_scopes_never_meets, {}),
        (c.TestScope.test_revisions_of_metadata_are_of_one_scope, {}),
        (c.TestScope.test_whole_threads_are_of_one_scope, {}),
        (c.TestScope.test_turns_of_scopes_never_meet, {}),
    ],
    archives_nothing: [
        (c.TestCutArchive.test_what_a_splice_cuts_is_archived_whole, {}),
        (c.TestCutArchive.test_an_overwrite_is_archived, {}),
        (c.TestConcurrency.test_writers_with_cuts_and_one_contested_answer, {}),
    ],
    archives_replacements: [(c.TestCutArchive.test_a_replacement_is_not_archived, {})],
    delete_misses_metadata: [
        (c.TestThreadAdmin.test_delete_removes_every_kind_of_record, {}),
    ],
    deletes_by_prefix: [(c.TestThreadAdmin.test_delete_takes_nothing_else, {})],
    pages_overlap: [
        (c.TestPagedMessages.test_a_chain_of_pages_shows_each_message_once, {"limit": 2}),
        (c.TestPagedMessages.test_a_cursor_before_everything_gives_an_empty_page, {}),
    ],
    drafts_move_the_revision: [
        (c.TestDrafts.test_a_draft_lies_beside_the_transcript, {}),
        (c.TestDrafts.test_a_draft_does_not_conflict_with_a_commit, {}),
    ],
    keeps_the_callers_objects: [
        (
            c.TestMessages.test_changing_what_was_passed_or_returned_changes_nothing_stored,
            {},
        ),
    ],
    takes_null_for_absent: [
        (c.TestInterrupts.test_responses_are_told_apart, {"kind": "null"}),
        (c.TestBatchCommit.test_responses_are_told_apart_in_a_batch, {"kind": "null"}),
    ],
    counts_time_in_seconds: [
        (c.TestRuns.test_a_lease_counts_from_the_stores_clock, {}),
        (c.TestInterrupts.test_i1_three_are_listed_and_leave_pending_as_they_are_settled, {}),
    ],
    merges_on_save: [
        (c.TestMessages.test_m1_a_second_save_replaces_the_first, {}),
        (c.TestMessages.test_an_empty_save_loads_as_an_empty_list, {}),
    ],
    sorts_activities: [
        (c.TestActivities.test_equal_indexes_keep_the_order_saved, {}),
        (
            c.TestActivities.test_changing_what_was_passed_or_returned_changes_nothing_stored,
            {},
        ),
    ],
    keeps_known_columns_of_activities: [
        (c.TestActivities.test_the_place_and_the_run_of_a_row_round_trip, {}),
    ],
    lists_by_creation: [
        (c.TestThreadAdmin.test_the_list_is_newest_first_and_pages_cover_it, {}),
    ],
    sweeps_runs_that_are_driven: [
        (c.TestMaintenance.test_runs_that_are_driven_parked_or_unleased_are_left_alone, {}),
    ],
}

_PAIRS = [
    pytest.param(mutant, case, given, id=f"{mutant.__name__}-{case.__name__}-{n}")
    for mutant, cases in _MUTANTS.items()
    for n, (case, given) in enumerate(cases)
]


@pytest.mark.parametrize(("mutant", "case", "given"), _PAIRS)
async def test_a_broken_backend_is_found(
    mutant: Mutant,
    case: Callable[..., Awaitable[None]],
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The case fails on the mutant, and passes on memory as it is."""
    async with bag("plain", memory_persistence) as healthy:
        await run_case(case, healthy, **given)
    with pytest.raises((AssertionError, ChatkeepError, ValueError, pytest.fail.Exception)):
        await run_case(case, mutant(monkeypatch), **given)


class _Mutated(FaultyBackend):
    """Memory that is a mutant while it is called; the model beside it stays as it is."""

    def __init__(self, inner: Backend, mutant: Mutant) -> None:
        super().__init__(inner)
        self._mutant = mutant

    def _clone(self) -> Any:
        return type(self)(self._inner, self._mutant)

    async def _via(self, name: str, call: Callable[[Backend], Awaitable[Any]]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            self._mutant(patch)
            return await super()._via(name, call)


def _mutated(mutant: Mutant) -> Persistence:
    with pytest.MonkeyPatch.context() as patch:
        (inner,) = mutant(patch).backends
    return _Mutated(inner, mutant).persistence()


@pytest.mark.parametrize(
    "mutant",
    [
        overwrites_settled_interrupts,
        loses_the_order_of_equal_times,
        reuses_numbers,
        drops_unknown_keys,
        applies_a_replayed_commit_twice,
        writes_before_it_checks,
        lets_any_driver_write,
        revives_ended_runs,
        shares_run_ids_between_threads,
        changes_the_status_of_ended_runs,
        ignores_claims,
        never_frees_a_claim,
        archives_nothing,
        archives_replacements,
        delete_misses_metadata,
        deletes_by_prefix,
        pages_overlap,
        drafts_move_the_revision,
        takes_null_for_absent,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_the_state_machine_finds_a_broken_backend(mutant: Mutant) -> None:
    """Random calls alone find each fault that they can reach, within 200 examples."""
    with pytest.raises(AssertionError):
        run_state_machine(lambda: _mutated(mutant), max_examples=200, random_seed=1, shrink=False)
