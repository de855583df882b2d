"""Every error of boto3 and of DynamoDB becomes one of chatkeep's."""

from __future__ import annotations

import inspect
from typing import Any

import boto3.exceptions
import botocore.exceptions
import pytest
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CompositionError,
    InvalidValue,
    RecordTooLarge,
    SchemaOutOfDate,
    StoreError,
)
from chatkeep_dynamodb.errors import Cancelled, Reason, cancelled, translate, try_again

OPERATIONS = (
    "BatchGetItem", "BatchWriteItem", "CreateTable", "DeleteItem", "DescribeTable",
    "DescribeTimeToLive", "GetItem", "PutItem", "Query", "TransactWriteItems", "UpdateItem",
    "UpdateTimeToLive",
)  # fmt: skip

COMMON = (
    "AccessDeniedException", "ExpiredTokenException", "IncompleteSignature", "InternalFailure",
    "InvalidSignatureException", "MissingAuthenticationTokenException", "NotAuthorized",
    "OptInRequired", "RequestExpired", "ServiceUnavailable", "ThrottlingException",
    "UnrecognizedClientException", "ValidationException", "UnknownOperationException",
    "SerializationException", "Throttling", "RequestTimeout",
)  # fmt: skip


def service_codes() -> list[str]:
    """The errors that the service model names for our operations, and those of all services."""
    model = Session().get_service_model("dynamodb")
    named = {
        shape.name for name in OPERATIONS for shape in model.operation_model(name).error_shapes
    }
    return sorted(named | set(COMMON))


def client_error(code: str, message: str = "x", status: int = 400, **more: Any) -> ClientError:
    return ClientError(
        {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},
            **more,
        },
        "PutItem",
    )


def library_errors() -> list[type[Any]]:
    found = [
        kind
        for module in (botocore.exceptions, boto3.exceptions)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, BotoCoreError | Boto3Error | ClientError) and kind is not ClientError
    ]
    return sorted(set(found), key=lambda kind: (kind.__module__, kind.__name__))


def instance(kind: type[Any]) -> Exception:
    if issubclass(kind, ClientError):
        return kind({"Error": {"Code": "Odd", "Message": "x"}}, "PutItem")
    for arguments in ((), ("x",), ("x", "y"), ("x", "y", "z")):
        try:
            return kind(*arguments)
        except (TypeError, KeyError, IndexError):
            continue
    return kind.__new__(kind)


@pytest.mark.parametrize("kind", library_errors())
def test_no_error_of_the_libraries_gets_out(kind: type[Any]) -> None:
    known = translate(instance(kind))
    assert isinstance(known, ChatkeepError), known
    assert str(known)


@pytest.mark.parametrize("code", service_codes())
def test_no_error_of_the_service_gets_out(code: str) -> None:
    known = translate(client_error(code))
    assert isinstance(known, StoreError)
    assert code in str(known) or isinstance(known, RecordTooLarge)


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        ("ProvisionedThroughputExceededException", "x", BackendUnavailable),
        ("ThrottlingException", "x", BackendUnavailable),
        ("RequestLimitExceeded", "x", BackendUnavailable),
        ("TransactionConflictException", "x", BackendUnavailable),
        ("InternalServerError", "x", BackendUnavailable),
        ("AccessDeniedException", "x", BackendUnavailable),
        ("UnrecognizedClientException", "x", BackendUnavailable),
        ("ResourceInUseException", "x", BackendUnavailable),
        ("ResourceNotFoundException", "x", SchemaOutOfDate),
        ("ValidationException", "The provided key element does not match", StoreError),
        ("ValidationException", "the key does not match the schema", SchemaOutOfDate),
        ("ValidationException", "The table does not have the specified index: i", SchemaOutOfDate),
        ("ValidationException", "Item size has exceeded the maximum allowed size", RecordTooLarge),
        ("ItemCollectionSizeLimitExceededException", "x", RecordTooLarge),
        ("Unheard", "x", StoreError),
    ],
)
def test_what_the_service_says_has_a_type(code: str, message: str, kind: type[Any]) -> None:
    assert type(translate(client_error(code, message))) is kind


def test_an_error_of_the_server_leaves_the_outcome_open() -> None:
    """Unlike throttling, which refuses before anything is written."""
    broken = translate(client_error("Whatever", status=503))
    assert isinstance(broken, BackendUnavailable)
    assert broken.outcome_unknown
    throttled = translate(client_error("ThrottlingException"))
    assert isinstance(throttled, BackendUnavailable)
    assert not throttled.outcome_unknown


def test_a_request_that_was_not_sent_has_a_known_outcome() -> None:
    refused = translate(botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"))
    assert isinstance(refused, BackendUnavailable)
    assert not refused.outcome_unknown
    cut = translate(botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"))
    assert isinstance(cut, BackendUnavailable)
    assert cut.outcome_unknown


def test_what_is_wrong_with_the_configuration_is_no_outage() -> None:
    assert isinstance(translate(botocore.exceptions.NoRegionError()), CompositionError)
    assert isinstance(translate(botocore.exceptions.NoCredentialsError()), BackendUnavailable)
    wrong = botocore.exceptions.ParamValidationError(report="x")
    assert isinstance(translate(wrong), InvalidValue)


def test_other_errors_are_left_alone() -> None:
    error = KeyError("x")
    assert translate(error) is error


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["None", "TransactionConflict"], None),
        (["ThrottlingError", "None"], None),
        (["ProvisionedThroughputExceeded", "TransactionConflict"], None),
        (["None", "ConditionalCheckFailed"], Cancelled),
        (["TransactionConflict", "ConditionalCheckFailed"], Cancelled),
        (["None", "ItemCollectionSizeLimitExceeded"], RecordTooLarge),
        (["None", "AccessDenied"], BackendUnavailable),
        (["None", "ValidationError"], StoreError),
    ],
)
def test_reasons_of_a_cancelled_transaction(codes: list[str], kind: Any) -> None:
    """A collision is sent again, a condition is judged, all else is an error that names the row."""
    reasons = [{"Code": code, "Message": "why"} for code in codes]
    error = client_error("TransactionCanceledException", CancellationReasons=reasons)
    found, known = cancelled(error, ["thread 't'", "run 'r'"])
    assert [reason.code for reason in found] == [None if c == "None" else c for c in codes]
    assert known is None if kind is None else type(known) is kind
    if known is not None:
        assert "run 'r'" in str(known)


def test_a_row_too_large_for_a_transaction_is_named() -> None:
    reasons = [
        {"Code": "None"},
        {"Code": "ValidationError", "Message": "Item size has exceeded the maximum allowed size"},
    ]
    error = client_error("TransactionCanceledException", CancellationReasons=reasons)
    _, known = cancelled(error, ["thread 't'", "run 'r'"])
    assert isinstance(known, RecordTooLarge)
    assert "run 'r'" in str(known)


def test_a_cancelled_transaction_that_nobody_judged_is_an_error() -> None:
    known = translate(Cancelled([Reason("ConditionalCheckFailed")], ["thread 't'"]))
    assert type(known) is StoreError
    assert "thread 't'" in str(known)


@pytest.mark.parametrize("code", ["ThrottlingException", "TransactionConflictException"])
def test_what_is_sent_again(code: str) -> None:
    assert try_again(client_error(code))
    assert not try_again(client_error("ValidationException"))
    assert not try_again(ValueError(code))
