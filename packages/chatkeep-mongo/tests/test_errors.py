"""Every error of PyMongo and BSON becomes one of chatkeep's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import bson.errors
import pymongo.errors
import pytest
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    NetworkTimeout,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WriteConcernError,
)

from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CorruptRecord,
    InvalidValue,
    RecordTooLarge,
    SchemaOutOfDate,
    StoreError,
)
from chatkeep_mongo.errors import only_duplicates, translate


def classes(module: Any) -> Iterator[type[Any]]:
    for _, kind in sorted(inspect.getmembers(module, inspect.isclass)):
        if issubclass(kind, (PyMongoError, bson.errors.BSONError)):
            yield kind


def instance(kind: type[Any]) -> Exception:
    arguments: list[tuple[Any, ...]] = [
        ("x",),
        ({"writeErrors": []},),
        ({}, False),
        (ValueError("x"),),
    ]
    if kind.__name__ == "ClientBulkWriteException":
        return kind({"error": None, "writeErrors": []}, verbose=False)
    for given in arguments:
        try:
            return kind(*given)
        except (TypeError, AttributeError):
            continue
    raise AssertionError(f"no instance of {kind}")


ERRORS = {*classes(pymongo.errors), *classes(bson.errors)}


@pytest.mark.parametrize("kind", sorted(ERRORS, key=lambda k: k.__name__))
def test_no_error_of_a_driver_gets_out(kind: type[Any]) -> None:
    known = translate(instance(kind))
    assert isinstance(known, ChatkeepError), known
    assert isinstance(known, StoreError | InvalidValue)
    assert str(known)


def test_there_are_errors_to_be_mapped() -> None:
    """The list that the test above goes through holds the ones that matter."""
    names = {kind.__name__ for kind in ERRORS}
    assert {"AutoReconnect", "BulkWriteError", "DocumentTooLarge", "InvalidBSON"} <= names


def test_what_is_no_database_error_is_left_alone() -> None:
    for error in (ValueError("x"), KeyError("x"), RuntimeError("x"), SchemaOutOfDate("x")):
        assert translate(error) is error


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (13, BackendUnavailable),
        (18, BackendUnavailable),
        (50, BackendUnavailable),
        (64, BackendUnavailable),
        (91, BackendUnavailable),
        (112, BackendUnavailable),
        (189, BackendUnavailable),
        (10107, BackendUnavailable),
        (11600, BackendUnavailable),
        (13435, BackendUnavailable),
        (10334, RecordTooLarge),
        (26, SchemaOutOfDate),
        (121, SchemaOutOfDate),
        (2, InvalidValue),
        (59, StoreError),
        (8000, StoreError),
    ],
)
def test_the_servers_code_decides(code: int, kind: type[Exception]) -> None:
    """Of a command, and of a write in a bulk of them."""
    assert type(translate(OperationFailure("x", code))) is kind
    details = {"writeErrors": [{"index": 0, "code": code, "errmsg": "x"}]}
    assert type(translate(BulkWriteError(details))) is kind


@pytest.mark.parametrize(
    ("error", "unknown"),
    [
        (AutoReconnect("reset"), True),
        (NetworkTimeout("late"), True),
        (ServerSelectionTimeoutError("nobody"), False),
        (OperationFailure("not primary", 10107), False),
        (OperationFailure("stepped down", 189), True),
        (WriteConcernError("timed out", 64, {}), True),
        (BulkWriteError({"writeConcernErrors": [{"code": 64, "errmsg": "x"}]}), True),
        (BulkWriteError({"writeConcernErrors": [{"code": 4711, "errmsg": "x"}]}), True),
    ],
)
def test_whether_a_write_may_have_been_applied_is_said(error: Exception, unknown: bool) -> None:
    known = translate(error)
    assert isinstance(known, BackendUnavailable)
    assert known.outcome_unknown is unknown


def test_a_write_that_the_server_says_may_be_retried_is_unavailable() -> None:
    """Whatever its code: drivers of later versions learn of new ones by this label."""
    details: Any = {"errorLabels": ["RetryableWriteError"]}
    known = translate(OperationFailure("x", 4711, details))
    assert isinstance(known, BackendUnavailable)
    assert known.outcome_unknown


def test_a_document_that_cannot_be_decoded_is_corrupt() -> None:
    assert isinstance(translate(bson.errors.InvalidBSON("x")), CorruptRecord)


def test_a_bulk_that_failed_for_more_than_taken_keys_is_no_mere_duplicate() -> None:
    taken = {"index": 0, "code": 11000}
    assert only_duplicates(BulkWriteError({"writeErrors": [taken, taken]}))
    for details in (
        {"writeErrors": [taken, {"index": 1, "code": 121}]},
        {"writeErrors": [taken], "writeConcernErrors": [{"code": 64}]},
        {"writeErrors": []},
    ):
        assert not only_duplicates(BulkWriteError(details))
