"""The rules of a commit: transitions, leases, claims, cuts, cursors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep.errors import CorruptRecord, InterruptConflict, InvalidValue, RunConflict
from chatkeep.records import (
    UNSET,
    InterruptRecord,
    Lease,
    RunError,
    RunPatch,
    RunRecord,
    RunStatus,
)
from chatkeep.rules import (
    check_driver,
    check_transition,
    check_writer,
    claim_interrupt,
    decode_cursor,
    decode_message,
    encode_cursor,
    encode_messages,
    find_interrupt,
    new_revision,
    patch_run,
    pending_interrupt,
    renewed_run,
    settle_interrupt,
    split_cut,
    start_run,
    visible_interrupt,
)
from chatkeep.stores import InterruptAnswer, InterruptRef, RunStart, TurnCommit

STATUSES: tuple[RunStatus, ...] = ("running", "interrupted", "completed", "failed", "aborted")


def a_run(status: RunStatus = "running", until: int | None = None, **fields: Any) -> RunRecord:
    lease = None if until is None else Lease(token="mine", until=until)
    return RunRecord(run_id="r", thread_id="t", status=status, started_at=1, lease=lease, **fields)


def an_interrupt(run_id: str = "r", **fields: Any) -> InterruptRecord:
    return InterruptRecord.model_validate(
        {
            "interrupt_id": "i",
            "run_id": run_id,
            "thread_id": "t",
            "requested_at": 1,
            "payload": {},
            **fields,
        }
    )


# ------------------------------------------------------------------------- transitions

ALLOWED = {
    "running": set(STATUSES),
    "interrupted": {"interrupted", "completed", "failed", "aborted"},
    "completed": {"completed"},
    "failed": {"failed"},
    "aborted": {"aborted"},
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(STATUSES, STATUSES)))
def test_a_run_takes_exactly_the_allowed_statuses(before: RunStatus, after: RunStatus) -> None:
    if after in ALLOWED[before]:
        check_transition(a_run(before), after, holds_lease=True)
    else:
        with pytest.raises(RunConflict) as caught:
            check_transition(a_run(before), after, holds_lease=True)
        assert caught.value.reason == "transition"


def test_only_the_holder_of_the_lease_may_still_complete_a_lost_run() -> None:
    lost = a_run("failed", until=0, finished_at=7, error=RunError(message="", code="worker_lost"))
    done = patch_run(lost, RunPatch(status="completed", finished_at=9), holds_lease=True)
    assert (done.status, done.finished_at, done.error) == ("completed", 9, None)
    with pytest.raises(RunConflict, match="failed to completed"):
        patch_run(lost, RunPatch(status="completed"), holds_lease=False)


def test_a_lost_run_that_its_worker_parks_is_not_finished_any_more() -> None:
    lost = a_run("failed", until=0, finished_at=7, error=RunError(message="", code="worker_lost"))
    parked = patch_run(lost, RunPatch(status="interrupted"), holds_lease=True)
    assert (parked.finished_at, parked.error) == (None, None)


@pytest.mark.parametrize(
    "name", ["thread_id", "threadId", "runId", "started_at", "status", "lease"]
)
def test_a_patch_cannot_reach_a_named_field_through_extra(name: str) -> None:
    with pytest.raises(InvalidValue, match="a field of its own"):
        patch_run(a_run(), RunPatch(extra={name: "x"}), holds_lease=False)


@pytest.mark.parametrize(
    "patch",
    [{"status": "asleep"}, {"status": None}, {"usage": [1]}, {"finished_at": "x"}],
    ids=["unknown status", "no status", "usage", "time"],
)
def test_a_patch_that_makes_no_run_is_refused(patch: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        patch_run(a_run(), RunPatch(**patch), holds_lease=False)


# ------------------------------------------------------------------------------ starts

START = RunStart(run_id="r", started_at=5, lease_token="new", lease_ms=100)


def test_a_new_run_gets_what_the_start_says_and_nothing_else() -> None:
    start = replace(START, parent_run_id="p", hide_from=4, extra={"mine": 1})
    assert start_run(None, "t", start, now=50).to_json() == {
        "runId": "r",
        "threadId": "t",
        "status": "running",
        "startedAt": 5,
        "parentRunId": "p",
        "hideFrom": 4,
        "mine": 1,
        "lease": {"token": "new", "until": 150},
    }


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (a_run(), "running"),
        (a_run(until=51), "running"),
        (a_run("completed"), "terminal"),
        (a_run("failed"), "terminal"),
        (a_run("aborted", until=0), "terminal"),
    ],
    ids=["no lease", "live", "completed", "failed", "aborted"],
)
def test_a_run_that_is_driven_or_has_ended_is_not_started_again(
    stored: RunRecord, reason: str
) -> None:
    with pytest.raises(RunConflict) as caught:
        start_run(stored, "t", START, now=50)
    assert caught.value.reason == reason


def test_a_run_of_another_thread_is_foreign_whatever_its_status() -> None:
    with pytest.raises(RunConflict) as caught:
        start_run(a_run("completed"), "other", START, now=50)
    assert caught.value.reason == "foreign-thread"


def test_a_run_whose_lease_ran_out_is_taken_over_and_nothing_else_changes() -> None:
    stored = a_run(until=50, name="n", usage={"totalTokens": 3})
    taken = start_run(stored, "t", replace(START, name="other", extra={"x": 1}), now=50)
    assert taken == stored.model_copy(update={"lease": Lease(token="new", until=150)})


def test_a_parked_run_is_driven_again_and_stays_parked() -> None:
    taken = start_run(a_run("interrupted"), "t", replace(START, hide_from=3), now=50)
    assert (taken.status, taken.hide_from) == ("interrupted", 3)
    assert taken.lease == Lease(token="new", until=150)


# ------------------------------------------------------------------------------ leases


def driver(**parts: Any) -> TurnCommit:
    return TurnCommit(commit_id="c", thread_id="t", run_id="r", lease_token="mine", **parts)


def test_a_lease_that_ran_out_is_held_until_somebody_takes_it() -> None:
    check_driver(driver(), a_run(until=10), now=99)


@pytest.mark.parametrize(
    "run",
    [None, a_run(), a_run().model_copy(update={"lease": Lease(token="theirs", until=999)})],
    ids=["no run", "no lease", "theirs"],
)
def test_a_commit_without_the_lease_is_refused(run: RunRecord | None) -> None:
    with pytest.raises(RunConflict) as caught:
        check_driver(driver(), run, now=0)
    assert caught.value.reason == "lease-lost"


def test_a_sweep_is_refused_while_the_lease_lives() -> None:
    check_driver(driver(lease_expired=True), a_run(until=10), now=10)
    with pytest.raises(RunConflict) as caught:
        check_driver(driver(lease_expired=True), a_run(until=10), now=9)
    assert caught.value.reason == "running"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (None, "unknown"),
        (a_run("failed", until=9), "terminal"),
        (a_run().model_copy(update={"lease": Lease(token="theirs", until=1)}), "lease-lost"),
    ],
    ids=["unknown", "terminal", "lost"],
)
def test_drafts_and_renewals_are_refused_in_one_order(run: RunRecord | None, reason: str) -> None:
    with pytest.raises(RunConflict) as caught:
        check_writer(run, "r", "t", "mine")
    assert caught.value.reason == reason
    with pytest.raises(RunConflict) as caught:
        renewed_run(run, "r", "t", "mine", 10, 0)
    assert caught.value.reason == reason


def test_a_renewal_counts_from_the_stores_clock() -> None:
    assert renewed_run(a_run(until=5), "r", "t", "mine", 10, 100).lease == Lease(
        token="mine", until=110
    )


# -------------------------------------------------------------------------- interrupts


def test_an_interrupt_is_born_pending_whatever_it_says() -> None:
    record = an_interrupt(status="resolved", response=1, resolved_at=2, claimed_by="x", mine="k")
    born = pending_interrupt(record)
    assert born.to_json() == {**an_interrupt().to_json(), "mine": "k"}
    assert born.response is UNSET


def test_an_interrupt_id_names_the_pending_record_else_the_newest() -> None:
    old, waiting, new = (
        an_interrupt("r1", status="resolved"),
        an_interrupt("r2"),
        an_interrupt("r3", status="cancelled"),
    )
    ref = InterruptRef(interrupt_id="i")
    assert find_interrupt([old, waiting, new], ref) is waiting
    assert find_interrupt([old, new], ref) is new
    assert find_interrupt([old, waiting], InterruptRef(interrupt_id="i", run_id="r1")) is old
    assert find_interrupt([old], InterruptRef(interrupt_id="j")) is None


ANSWER = InterruptAnswer(interrupt_id="i", response=None)


def test_an_answer_settles_once_and_keeps_a_null() -> None:
    settled = settle_interrupt(
        an_interrupt(claimed_by="r2"),
        ANSWER,
        thread_id="t",
        run_id="r2",
        claim_live=True,
        now=7,
    )
    assert settled.to_json() == {
        **an_interrupt().to_json(),
        "status": "resolved",
        "resolvedAt": 7,
        "response": None,
    }
    with pytest.raises(InterruptConflict, match="already resolved"):
        settle_interrupt(settled, ANSWER, thread_id="t", run_id=None, claim_live=False, now=8)


@pytest.mark.parametrize(
    ("live", "run_id", "refused"),
    [
        (True, None, True),
        (True, "other", True),
        (True, "claimer", False),
        (False, None, False),
    ],
)
def test_an_answer_is_refused_while_another_live_run_has_claimed_it(
    live: bool, run_id: str | None, refused: bool
) -> None:
    record = an_interrupt(claimed_by="claimer")
    if not refused:
        settle_interrupt(record, ANSWER, thread_id="t", run_id=run_id, claim_live=live, now=1)
        return
    with pytest.raises(InterruptConflict, match="claimed"):
        settle_interrupt(record, ANSWER, thread_id="t", run_id=run_id, claim_live=live, now=1)


REF = InterruptRef(interrupt_id="i")


def test_a_claim_is_taken_once_and_ends_with_its_run() -> None:
    claimed = claim_interrupt(an_interrupt(), REF, thread_id="t", run_id="r2", claim_live=False)
    assert claimed.claimed_by == "r2"
    for again in ("r2", "r3"):
        with pytest.raises(InterruptConflict, match="claimed"):
            claim_interrupt(claimed, REF, thread_id="t", run_id=again, claim_live=True)
    assert visible_interrupt(claimed, claim_live=True).claimed_by == "r2"
    assert visible_interrupt(claimed, claim_live=False).claimed_by is None
    taken = claim_interrupt(claimed, REF, thread_id="t", run_id="r3", claim_live=False)
    assert taken.claimed_by == "r3"


@pytest.mark.parametrize("record", [None, an_interrupt(status="cancelled")], ids=["none", "done"])
def test_nothing_is_claimed_that_is_not_pending(record: InterruptRecord | None) -> None:
    with pytest.raises(InterruptConflict):
        claim_interrupt(record, REF, thread_id="t", run_id="r2", claim_live=False)


# ---------------------------------------------------------------------- messages, cuts


def test_a_message_is_an_object_with_a_storable_id_or_none() -> None:
    rows = [{"id": "m", "role": "user"}, {"id": "", "role": "x"}, {"role": "user"}]
    entries = encode_messages(rows)  # type: ignore[arg-type]
    assert [entry.message_id for entry in entries] == ["m", None, None]
    for name in (7, "\x00", "x" * 1025, ["id"]):
        with pytest.raises(InvalidValue, match=r"messages\[0\].id"):
            encode_messages([{"id": name, "role": "user"}])  # type: ignore[typeddict-item]
    for bad in (["id"], None, "id", {}, {"id": "m"}, {"role": None}, {"role": 7}):
        with pytest.raises(InvalidValue, match=r"messages\[0\]"):
            encode_messages([bad])  # type: ignore[list-item]
    for body in ("{}", '{"role":7}', "[]", '"role"', "null"):
        with pytest.raises(CorruptRecord):
            decode_message(body)


def test_a_cut_message_whose_id_returns_is_replaced_and_the_rest_is_archived() -> None:
    tail = encode_messages([{"id": "b", "role": "user", "content": "new"}, {"role": "user"}])
    cut = [(1, "a"), (2, "b"), (3, None)]
    assert split_cut(cut, tail, archive=True) == ([1, 3], [2])
    assert split_cut(cut, tail, archive=False) == ([], [1, 2, 3])


# -------------------------------------------------------------------------------- texts


@given(st.integers(0, 2**53), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_cursor_comes_back_as_it_went(number: int, name: str) -> None:
    assert decode_cursor(encode_cursor(number, name), int, str) == (number, name)


@pytest.mark.parametrize(
    "cursor",
    ["", "x", "!!", "AAAA", encode_cursor(1), encode_cursor("a", 1), "W3RydWUsImEiXQ", "é"],
)
def test_a_text_that_is_no_cursor_of_ours_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidValue, match="cursor"):
        decode_cursor(cursor, int, str)


def test_a_revision_never_repeats() -> None:
    assert len({new_revision(1) for _ in range(1000)}) == 1000
