"""Every error of boto3 and of DynamoDB, as one of chatkeep's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from boto3.exceptions import Boto3Error
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProxyConnectionError,
    SSLError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
    UnknownCredentialError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)

from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CompositionError,
    InvalidValue,
    RecordTooLarge,
    SchemaOutOfDate,
    StoreError,
)
from chatkeep_dynamodb.items import ITEM_BYTES, Item, from_wire

__all__ = ["Cancelled", "Reason", "cancelled", "error_code", "old_item", "translate", "try_again"]

_THROTTLED = {
    "ProvisionedThroughputExceededException", "ProvisionedThroughputExceeded",
    "ThrottlingException", "ThrottlingError", "Throttling", "ThrottledException",
    "RequestThrottled", "RequestThrottledException", "RequestLimitExceeded",
    "TooManyRequestsException",
    "BandwidthLimitExceeded", "LimitExceededException", "PriorRequestNotComplete", "SlowDown",
    "EC2ThrottledException", "TransactionInProgressException",
}  # fmt: skip
_COLLISION = {
    "TransactionConflictException",
    "TransactionConflict",
    "ReplicatedWriteConflictException",
}
_BROKEN = {
    "InternalServerError", "InternalFailure", "InternalServerErrorException", "ServiceUnavailable",
    "ServiceUnavailableException", "RequestTimeout", "RequestTimeoutException",
}  # fmt: skip
_REFUSED = {
    "AccessDeniedException", "AccessDenied", "UnrecognizedClientException",
    "InvalidSignatureException", "SignatureDoesNotMatch", "IncompleteSignature",
    "ExpiredTokenException", "ExpiredToken", "RequestExpired", "InvalidClientTokenId",
    "MissingAuthenticationToken", "MissingAuthenticationTokenException", "OptInRequired",
    "NotAuthorized", "SubscriptionRequiredException", "InaccessibleEncryptionDateTimeException",
}  # fmt: skip
_NOT_READY = {"ResourceInUseException", "TableInUseException"}
_NO_TABLE = {"ResourceNotFoundException", "TableNotFoundException", "IndexNotFoundException"}
_TOO_LARGE = {"ItemCollectionSizeLimitExceededException", "ItemCollectionSizeLimitExceeded"}
_SIZE_TEXTS = ("item size", "transaction size", "aggregate size", "exceeded maximum allowed")
_SCHEMA_TEXTS = (
    "does not match the schema",
    "does not have the specified index",
    "missing the key",
)

_NOT_SENT = (
    EndpointConnectionError,
    ConnectTimeoutError,
    ProxyConnectionError,
    SSLError,
)
_NO_LOGIN = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
    UnknownCredentialError,
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one action of a transaction failed (``None``: it did not), and the row as it is."""

    code: str | None
    message: str = ""
    item: Item | None = None


@dataclass(eq=False)
class Cancelled(Exception):
    """A transaction was refused by the condition of one of its rows; nothing was written."""

    reasons: Sequence[Reason]
    names: Sequence[str] = field(default_factory=tuple[str, ...])

    def __str__(self) -> str:
        return _describe(self.reasons, self.names)


def error_code(error: BaseException) -> str:
    """The service's word for an error; empty for one that is not the service's."""
    if not isinstance(error, ClientError):
        return ""
    return str(cast("Any", error.response).get("Error", {}).get("Code", ""))


def old_item(error: ClientError) -> Item | None:
    """The row that a failed condition met, where it was asked for."""
    wire = cast("Any", error.response).get("Item")
    return from_wire(wire) if wire else None


def try_again(error: BaseException) -> bool:
    """Whether nothing was written, and the same request may well succeed a moment later."""
    return error_code(error) in _THROTTLED | _COLLISION


def cancelled(error: ClientError, names: Sequence[str]) -> tuple[list[Reason], Exception | None]:
    """The reasons of a cancelled transaction; and the error that it is: None if it may be sent
    again as it is, :class:`Cancelled` if a condition failed."""
    found: list[Any] = cast("Any", error.response).get("CancellationReasons") or []
    reasons = [
        Reason(
            None if reason.get("Code") in (None, "None") else str(reason["Code"]),
            str(reason.get("Message") or ""),
            from_wire(reason["Item"]) if reason.get("Item") else None,
        )
        for reason in found
    ]
    codes = {reason.code for reason in reasons} - {None}
    if codes & {"ConditionalCheckFailed", "DuplicateItem"}:
        return reasons, Cancelled(reasons, names)
    text = _describe(reasons, names)
    if codes and codes <= _THROTTLED | _COLLISION:
        return reasons, None
    if codes & _TOO_LARGE or any(_says(reason.message, _SIZE_TEXTS) for reason in reasons):
        return reasons, RecordTooLarge(text, ITEM_BYTES, ITEM_BYTES)
    if codes & _REFUSED:
        return reasons, BackendUnavailable(text)
    return reasons, StoreError(text or str(error))


def _describe(reasons: Sequence[Reason], names: Sequence[str]) -> str:
    told = [
        f"{names[i] if i < len(names) else f'item {i}'}: {reason.code}"
        + (f" ({reason.message})" if reason.message else "")
        for i, reason in enumerate(reasons)
        if reason.code is not None
    ]
    return "; ".join(told)


def _says(message: str, texts: Sequence[str]) -> bool:
    lower = message.lower()
    return any(text in lower for text in texts)


def translate(error: Exception) -> Exception:
    """The chatkeep error for ``error``; ``error`` itself if it is neither boto3's nor the
    service's. The caller chains it (``raise translate(error) from error``)."""
    if isinstance(error, ChatkeepError):
        return error
    if isinstance(error, Cancelled):
        return StoreError(f"a transaction was refused: {error}")
    if isinstance(error, ClientError):
        return _from_code(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, _NO_LOGIN):
        return BackendUnavailable(text)
    if isinstance(error, HTTPClientError | BotoConnectionError):
        return BackendUnavailable(text, outcome_unknown=not isinstance(error, _NOT_SENT))
    if isinstance(error, NoRegionError):
        return CompositionError(f"{text} (region=…, or AWS_DEFAULT_REGION)")
    if isinstance(error, ParamValidationError):
        return InvalidValue("$", text)
    if isinstance(error, BotoCoreError | Boto3Error):
        return StoreError(text)
    return error


def _from_code(error: ClientError) -> Exception:
    code, text = error_code(error), str(error)
    status = cast("Any", error.response).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _THROTTLED | _COLLISION | _REFUSED | _NOT_READY:
        return BackendUnavailable(text)
    if code in _BROKEN or status >= 500:
        return BackendUnavailable(text, outcome_unknown=True)
    if code in _NO_TABLE:
        return SchemaOutOfDate(f"{text}: run `chatkeep migrate URL` with a role that may")
    if code in _TOO_LARGE:
        return RecordTooLarge("an item collection", ITEM_BYTES, ITEM_BYTES)
    if code == "ValidationException" and _says(text, _SCHEMA_TEXTS):
        return SchemaOutOfDate(f"{text}: the table is not one of chatkeep's")
    if code == "ValidationException" and _says(text, _SIZE_TEXTS):
        return RecordTooLarge("an item", ITEM_BYTES, ITEM_BYTES)
    return StoreError(text)
