"""Who owns a row: the scope that is part of every key, and the rules for ids.

Scopes match exactly: a tenant is no parent of tenant + user. The empty scope is the
default; a row of another scope does not exist for its caller.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from chatkeep.errors import InvalidValue

__all__ = ["EMPTY_SCOPE", "MAX_ID_BYTES", "Scope", "check_id", "key_digest"]

MAX_ID_BYTES = 1024
"""Longest id, in UTF-8 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Tenant and user, from the trusted session, never from a request body.

    Raises:
        InvalidValue: an empty text, or a text that is no valid id.
    """

    tenant_id: str | None = None
    user_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("tenant_id", "user_id"):
            value = getattr(self, name)
            if value is not None:
                check_id(value, f"scope.{name}")

    @property
    def key(self) -> tuple[str, str]:
        """Tenant and user as they stand in keys; ``""`` means absent (never a value)."""
        return (self.tenant_id or "", self.user_id or "")

    @classmethod
    def from_key(cls, tenant: str, user: str) -> Scope:
        """The scope that :attr:`key` came from."""
        return cls(tenant_id=tenant or None, user_id=user or None)


EMPTY_SCOPE = Scope()


def check_id(value: object, what: str) -> str:
    """Return ``value`` if it may be an id: text, 1 to 1 024 UTF-8 bytes, no NUL, no surrogate.

    An id is refused, never repaired: two ids would meet.

    Raises:
        InvalidValue: names ``what``.
    """
    if not isinstance(value, str):
        raise InvalidValue(what, f"must be text, not {type(value).__name__}")
    if not value:
        raise InvalidValue(what, "must not be empty")
    if "\x00" in value:
        raise InvalidValue(what, "must not contain NUL")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise InvalidValue(what, "must not contain a lone surrogate") from None
    if size > MAX_ID_BYTES:
        raise InvalidValue(what, f"must have at most {MAX_ID_BYTES} UTF-8 bytes, not {size}")
    return value


def key_digest(*parts: str) -> bytes:
    """32 bytes that stand for a compound key of any length.

    Parts are length-prefixed, never joined with a delimiter, so no two keys share one.
    """
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "big"))
        digest.update(raw)
    return digest.digest()
