"""Metadata: small values under (namespace, key), each with a revision that never returns."""

from __future__ import annotations

import secrets
from typing import Any

from chatkeep.codec import FORMAT_VERSION, JsonValue, decode, encode
from chatkeep.rules import ANY_REVISION
from chatkeep.scope import Scope, key_digest
from chatkeep.stores import VersionedValue
from chatkeep_sql.program import Program, first
from chatkeep_sql.rows import check_format
from chatkeep_sql.statements import Statements

__all__ = ["delete_value", "get_value", "owner_key", "put_value", "values_of"]


def owner_key(scope: Scope, key: str) -> bytes:
    """Digest that finds all values under a key (a thread's metadata)."""
    return key_digest("metadata-of", *scope.key, key)


def _key(scope: Scope, namespace: str, key: str) -> bytes:
    return key_digest("metadata", *scope.key, namespace, key)


def _value(text: str, version: int, namespace: str, key: str) -> JsonValue:
    what = f"metadata {namespace!r} {key!r}"
    check_format(version, what)
    return decode(text, what)


def get_value(
    sql: Statements, scope: Scope, namespace: str, key: str
) -> Program[VersionedValue | None]:
    """Value and revision."""
    row = first((yield sql.value, {"by_key": _key(scope, namespace, key)}))
    if row is None:
        return None
    return VersionedValue(value=_value(row[0], row[2], namespace, key), revision=row[1])


def put_value(
    sql: Statements,
    scope: Scope,
    namespace: str,
    key: str,
    value: JsonValue,
    expected: str | None,
) -> Program[str | None]:
    """Write if the revision is ``expected``; the new revision, or None if it was not.

    Two first writers meet in the primary key: the slower one's transaction fails and is run
    again, and then sees the other's row.
    """
    text = encode(value, "value").decode()
    digest = _key(scope, namespace, key)
    row: Any = first((yield sql.lock_value, {"by_key": digest}))
    if expected != ANY_REVISION and expected != (None if row is None else row[1]):
        return None
    revision = secrets.token_hex(12)
    values = {"value": text, "revision": revision, "format": FORMAT_VERSION}
    if row is not None:
        yield sql.update_value, {**values, "by_key": digest}
        return revision
    tenant, user = scope.key
    keys = {
        "key_digest": digest,
        "owner_key": owner_key(scope, key),
        "tenant_id": tenant,
        "user_id": user,
        "namespace": namespace,
        "key": key,
    }
    yield sql.insert_value, {**keys, **values}
    return revision


def delete_value(sql: Statements, scope: Scope, namespace: str, key: str) -> Program[None]:
    """Remove; absent is a no-op."""
    yield sql.delete_value, {"by_key": _key(scope, namespace, key)}


def values_of(sql: Statements, scope: Scope, key: str) -> Program[dict[str, JsonValue]]:
    """All values under ``key``, by namespace."""
    rows = yield sql.values_of, {"by_owner": owner_key(scope, key)}
    return {namespace: _value(text, version, namespace, key) for namespace, text, version in rows}
