"""Metadata: small values under (namespace, key), each with a revision that never returns."""

from __future__ import annotations

import secrets
from itertools import count

from chatkeep.codec import FORMAT_VERSION, JsonValue, decode, encode
from chatkeep.rules import ANY_REVISION
from chatkeep.scope import Scope
from chatkeep.stores import VersionedValue
from chatkeep_mongo.bodies import Patience, Torn, check_format, load_bodies, put_body
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.layout import METADATA, PIECES, Document, value_key, values_key
from chatkeep_mongo.redo import back_off, delete_value

__all__ = ["delete_value_at", "get_value", "put_value", "values_of"]


async def get_value(db: Driver, scope: Scope, namespace: str, key: str) -> VersionedValue | None:
    """Value and revision."""
    rows = await _find(db, {"_id": value_key(scope, namespace, key)})
    if not rows:
        return None
    return VersionedValue(value=_value(rows[0]), revision=rows[0]["revision"])


async def values_of(db: Driver, scope: Scope, key: str) -> dict[str, JsonValue]:
    """All values under ``key``, by namespace."""
    rows = await _find(db, {"owner": values_key(scope, key)})
    return {row["namespace"]: _value(row) for row in rows}


async def _find(db: Driver, query: Document) -> list[Document]:
    patience = Patience("metadata")
    for attempt in count():
        if attempt:
            await back_off(attempt)
        rows = await db.find(METADATA, query)
        try:
            for row in rows:
                await load_bodies(db, _place(row["_id"]), [row])
        except Torn as error:
            patience.torn(error, ".".join(row["revision"] for row in rows))
            continue
        return rows
    raise AssertionError("unreachable")


def _place(key: str) -> str:
    """What the pieces of a value hang on."""
    return f"value.{key}"


def _value(document: Document) -> JsonValue:
    what = f"metadata {document['namespace']!r} {document['key']!r}"
    check_format(document, what)
    return decode(document.get("body") or "", what)


async def put_value(
    db: Driver,
    scope: Scope,
    namespace: str,
    key: str,
    value: JsonValue,
    expected: str | None,
) -> str | None:
    """Write if the revision is ``expected``; the new revision, or None if it was not."""
    body = encode(value, "value")
    digest = value_key(scope, namespace, key)
    revision = secrets.token_hex(12)
    fields: Document = {"revision": revision, "format": FORMAT_VERSION}
    pieces = put_body(fields, body, t=_place(digest), piece=revision)
    if pieces:
        await db.insert_missing(PIECES, pieces)
    if await _write(db, digest, _born(scope, namespace, key), fields, expected):
        return revision
    if pieces:
        await db.delete(PIECES, {"t": _place(digest), "piece": fields["piece"]})
    return None


async def _write(
    db: Driver, digest: str, born: Document, fields: Document, expected: str | None
) -> bool:
    if expected is None:
        return await db.insert(METADATA, [{"_id": digest, **born, **fields}])
    query: Document = {"_id": digest}
    if expected != ANY_REVISION:
        query["revision"] = expected
    unset = ("piece", "parts") if "body" in fields else ("body",)
    change = {"$set": fields, "$unset": dict.fromkeys(unset, "")}
    while True:
        was = await db.change(METADATA, query, change, {"piece": 1}, after=False)
        if was is not None:
            if "piece" in was:
                await db.delete(PIECES, {"t": _place(digest), "piece": was["piece"]})
            return True
        if expected != ANY_REVISION:
            return False
        # A first value and no race: a plain insert; else somebody's is there to be replaced.
        if await db.insert(METADATA, [{"_id": digest, **born, **fields}]):
            return True


def _born(scope: Scope, namespace: str, key: str) -> Document:
    """What stands in the document of a value beside the value."""
    tenant, user = scope.key
    return {
        "owner": values_key(scope, key),
        "tenant": tenant,
        "user": user,
        "namespace": namespace,
        "key": key,
    }


async def delete_value_at(db: Driver, scope: Scope, namespace: str, key: str) -> None:
    """Remove; absent is a no-op."""
    digest = value_key(scope, namespace, key)
    for row in await db.find(METADATA, {"_id": digest}, {"revision": 1}):
        await delete_value(db, digest, row["revision"])
