"""Records: absent, null and a value are three states; unknown fields are kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticValidationError

from chatkeep.errors import CorruptRecord, InvalidValue
from chatkeep.records import (
    RUN_STATUSES,
    UNSET,
    ActivityRecord,
    CutRecord,
    InterruptRecord,
    Lease,
    ModelMessage,
    RunError,
    RunPatch,
    RunRecord,
    is_run_status,
    is_set,
    is_terminal,
)

RUN = {"runId": "r", "threadId": "t", "status": "running", "startedAt": 5}
INTERRUPT = {
    "interruptId": "i",
    "runId": "r",
    "threadId": "t",
    "status": "pending",
    "requestedAt": 1,
    "payload": {},
}

values = st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
extras = st.dictionaries(st.text("xyz", min_size=1, max_size=4), values, max_size=3)


def test_an_absent_optional_field_is_missing_in_json() -> None:
    assert RunRecord.from_json(RUN).to_json() == RUN


@given(extras, st.none() | st.booleans(), st.none() | st.integers(0), extras)
def test_a_run_round_trips_with_the_fields_that_nobody_knows(
    extra: dict[str, Any], cancel: bool | None, finished: int | None, usage: dict[str, Any]
) -> None:
    run = RunRecord.model_validate(
        {**RUN, **extra, "cancelRequested": cancel, "finishedAt": finished, "usage": usage}
    )
    assert RunRecord.from_json(run.to_json()) == run
    assert {key: run.to_json()[key] for key in extra} == extra


@pytest.mark.parametrize("response", [None, False, "", 0, [], {"a": None}])
def test_a_null_response_is_a_value_and_an_absent_one_is_missing(response: Any) -> None:
    record = InterruptRecord.from_json({**INTERRUPT, "response": response})
    assert record.to_json()["response"] == response
    assert is_set(record.response)
    bare = InterruptRecord.from_json(INTERRUPT)
    assert bare.response is UNSET
    assert bare.to_json() == INTERRUPT


def test_cancel_requested_has_three_states() -> None:
    states = [RunRecord.from_json({**RUN, "cancelRequested": v}) for v in (True, False)]
    assert [s.to_json().get("cancelRequested", "-") for s in states] == [True, False]
    assert "cancelRequested" not in RunRecord.from_json(RUN).to_json()


@pytest.mark.parametrize("status", ["toString", "", "RUNNING", "paused", "__class__"])
def test_a_status_outside_the_five_words_is_a_corrupt_record(status: str) -> None:
    assert not is_run_status(status)
    assert not is_terminal(status)
    with pytest.raises(CorruptRecord, match="run r"):
        RunRecord.from_json({**RUN, "status": status}, "run r")


def test_three_of_the_five_statuses_are_terminal() -> None:
    ended = {status for status in RUN_STATUSES if is_terminal(status)}
    assert ended == {"completed", "failed", "aborted"}


def test_a_missing_field_is_a_corrupt_record() -> None:
    with pytest.raises(CorruptRecord):
        CutRecord.from_json({"cutId": "c"})


def test_a_record_cannot_be_changed() -> None:
    run = RunRecord.from_json(RUN)
    with pytest.raises(ValueError, match="frozen"):
        run.status = "failed"  # type: ignore[misc]


def test_content_that_cannot_be_stored_is_refused_on_the_way_out() -> None:
    row = ActivityRecord(id="a", activity_type="x", content={"n": float("nan")}, index=0)
    with pytest.raises(InvalidValue, match=r"\$\.content\.n"):
        row.to_json()


def test_a_run_lives_until_its_lease_ends_and_for_ever_without_one() -> None:
    leased = RunRecord.from_json({**RUN, "lease": {"token": "x", "until": 10}})
    assert leased.live(9)
    assert not leased.live(10)
    assert RunRecord.from_json(RUN).live(2**60)
    assert not RunRecord.from_json({**RUN, "status": "aborted"}).live(0)


def test_a_patch_leaves_what_is_absent_and_clears_what_is_none() -> None:
    run = RunRecord.from_json({**RUN, "sandboxKey": "s", "cancelRequested": False, "mine": 1})
    patched = RunPatch(
        status="failed",
        sandbox_key=None,
        error=RunError(message="m"),
        lease=Lease(token="t", until=3),
        extra={"mine": None, "more": [1]},
    ).apply(run)
    assert patched.to_json() == {
        **RUN,
        "status": "failed",
        "cancelRequested": False,
        "error": {"message": "m"},
        "lease": {"token": "t", "until": 3},
        "more": [1],
    }
    assert RunPatch().apply(run) == run


def test_unset_is_falsy_and_says_its_name() -> None:
    assert not UNSET
    assert repr(UNSET) == "UNSET"


def test_a_message_type_requires_a_role_and_nothing_else() -> None:
    """A type checker, and pydantic, say what every store says."""
    of_messages = TypeAdapter(ModelMessage)
    assert of_messages.validate_python({"role": "user"}) == {"role": "user"}
    with pytest.raises(PydanticValidationError, match="role"):
        of_messages.validate_python({"id": "m", "content": "x"})
