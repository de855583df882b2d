"""A commit as arguments: the short way gives what the rules of the core give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep.errors import InvalidValue, RecordTooLarge
from chatkeep.records import RUN_STATUSES, UNSET, Lease, RunError, RunPatch, RunRecord
from chatkeep.rules import patch_run, start_run
from chatkeep.stores import RunStart, Splice, TurnCommit
from chatkeep_redis import encoded
from chatkeep_redis.encoded import check_size, commit_mark, encode_commit
from chatkeep_redis.rows import fields_of_run

texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), min_size=1)
any_texts = st.text(max_size=5)
integers = st.integers(-(2**53) + 1, 2**53 - 1)
jsons = st.dictionaries(any_texts, st.none() | st.booleans() | integers | any_texts, max_size=3)


def field(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just(UNSET) | st.none() | values


patches = st.builds(
    RunPatch,
    status=st.just(UNSET) | st.sampled_from(sorted(RUN_STATUSES)),
    finished_at=field(integers),
    error=field(st.builds(RunError, message=any_texts, code=st.none() | any_texts)),
    usage=field(jsons),
    cancel_requested=field(st.booleans()),
    detached_since=field(integers),
    sandbox_key=field(any_texts),
    driver_epoch=field(integers),
    hide_from=field(integers),
    detached=field(st.booleans()),
    lease=field(st.builds(Lease, token=texts, until=integers)),
    extra=st.just({}) | st.just({"mine": 1, "gone": None}),
)
starts = st.builds(
    RunStart,
    run_id=texts,
    started_at=integers,
    status=st.sampled_from(sorted(RUN_STATUSES)),
    lease_token=st.none() | texts,
    parent_run_id=st.none() | texts,
    subagent_run_id=st.none() | texts,
    name=st.none() | texts,
    hide_from=st.none() | integers,
    extra=st.just({}) | st.just({"mine": [1]}),
)


@given(patches)
def test_the_short_way_of_a_patch_is_that_of_the_rules(patch: RunPatch) -> None:
    short = encoded._plain_patch(patch)
    blank = RunRecord(run_id="r", thread_id="t", status="running", started_at=0)
    fields = fields_of_run(patch_run(blank, patch, holds_lease=True))
    if patch.status is UNSET:
        fields.pop("status")
    fields.pop("startedAt")
    if short is not None:
        assert short == fields


@given(starts)
def test_the_short_way_of_a_start_is_that_of_the_rules(start: RunStart) -> None:
    short = encoded._plain_start(start)
    fields = fields_of_run(start_run(None, "t", start, 0))
    if short is not None:
        assert dict(short) == {k: v for k, v in fields.items() if not k.startswith("lease")}


def test_usual_boundaries_take_the_short_way() -> None:
    error = RunError(message="m", code="c")
    for patch in (
        RunPatch(status="completed", finished_at=1, usage={"n": 1}),
        RunPatch(status="failed", finished_at=1, error=error),
        RunPatch(status="interrupted", usage=None, cancel_requested=True, hide_from=None),
    ):
        assert encoded._plain_patch(patch) is not None
    assert encoded._plain_start(RunStart(run_id="r", started_at=1, hide_from=3)) is not None


@pytest.mark.parametrize(
    "patch",
    [
        RunPatch(status=None),  # type: ignore[arg-type]
        RunPatch(status="odd"),  # type: ignore[arg-type]
        RunPatch(usage={"n": float("nan")}),
        RunPatch(cancel_requested="yes please"),  # type: ignore[arg-type]
        RunPatch(extra={"status": 1}),
        RunPatch(extra={"threadId": "x"}),
    ],
)
def test_a_patch_that_no_run_can_have_is_refused_before_anything_is_sent(patch: RunPatch) -> None:
    with pytest.raises(InvalidValue):
        encode_commit(TurnCommit(commit_id="c", thread_id="t", run_id="r", run=patch))


def test_a_value_longer_than_any_server_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "MAX_VALUE_BYTES", 100)
    check_size("x", b"a" * 100)
    tail: Any = [{"role": "user", "content": "x" * 100}]
    commit = TurnCommit(commit_id="c", thread_id="t", splice=Splice(keep_through=0, tail=tail))
    with pytest.raises(RecordTooLarge) as caught:
        encode_commit(commit)
    assert caught.value.limit == 100


@given(st.sets(texts, max_size=50))
def test_a_mark_is_short_and_plain(ids: set[str]) -> None:
    marks = {commit_mark(i) for i in ids}
    assert len(marks) == len(ids)
    assert all(len(mark) == 12 and mark.isascii() and " " not in mark for mark in marks)
