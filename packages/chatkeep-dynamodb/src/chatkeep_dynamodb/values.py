"""Metadata: small values under (namespace, key), each with a revision of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from botocore.exceptions import ClientError

from chatkeep.codec import FORMAT_VERSION, JsonValue, decode, encode
from chatkeep.errors import BackendUnavailable, RecordTooLarge
from chatkeep.rules import ANY_REVISION, new_revision
from chatkeep.stores import VersionedValue
from chatkeep_dynamodb.client import Action, Condition, gather
from chatkeep_dynamodb.errors import Cancelled, error_code, old_item
from chatkeep_dynamodb.fetch import fetch, grouped
from chatkeep_dynamodb.items import (
    TRANSACTION_BYTES,
    TRANSACTION_ITEMS,
    Item,
    Key,
    body_of,
    check_format,
    sizes,
    with_body,
)
from chatkeep_dynamodb.keys import VALUE, behind, chunk_sk, value_pk, value_sk
from chatkeep_dynamodb.state import Place

__all__ = ["delete_value", "delete_values_of", "get_value", "put_value", "values_of"]

_TRIES = 20


async def get_value(place: Place, namespace: str, key: str) -> VersionedValue | None:
    """Value and revision."""
    at = (value_pk(place.scope, key), value_sk(namespace))
    rows = (await fetch(place.table, [at])).get(at)
    if rows is None:
        return None
    if len(rows) != rows[0].get("parts", 1):
        raise BackendUnavailable(f"metadata {namespace!r} was written to during each read of it")
    return VersionedValue(value=_value(rows), revision=rows[0]["revision"])


def _value(rows: Sequence[Item]) -> JsonValue:
    what = f"metadata {rows[0].get('namespace')!r}"
    check_format(rows[0], what)
    return decode(body_of(rows[0], rows[1:], what), what)


async def put_value(
    place: Place, namespace: str, key: str, value: JsonValue, expected: str | None
) -> str | None:
    """Write if the revision is ``expected``; the new revision, or None if it was not."""
    body = encode(value, "value")
    at = (value_pk(place.scope, key), value_sk(namespace))
    # The order of writes does not depend on the number in front, only that none is repeated.
    revision = new_revision(place.moment())
    item: Item = {
        "pk": at[0],
        "sk": at[1],
        "kind": "value",
        "namespace": namespace,
        "key": key,
        "revision": revision,
        "format": FORMAT_VERSION,
    }
    rows = with_body(item, body, {"revision": revision})
    if expected == ANY_REVISION:
        return await _put_always(place, at, rows)
    try:
        await _put(place, rows, expected)
    except Cancelled as error:
        found = error.reasons[0].item
    except ClientError as error:
        if error_code(error) != "ConditionalCheckFailedException":
            raise
        found = old_item(error)
    else:
        return revision
    # A client that sent its request twice meets its own first one.
    return revision if found is not None and found["revision"] == revision else None


async def _put_always(place: Place, at: Key, rows: Sequence[Item]) -> str:
    """Write, whatever is there."""
    revision: str = rows[0]["revision"]
    if len(rows) == 1:
        await _remove_chunks(place, await place.table.put(rows[0]))
        return revision
    for _ in range(_TRIES):
        found = await place.table.get(at, ("revision",))
        try:
            await _put(place, rows, None if found is None else found["revision"])
        except Cancelled:
            continue
        return revision
    raise BackendUnavailable(f"metadata {rows[0]['namespace']!r}: others won {_TRIES} times")


async def _put(place: Place, rows: Sequence[Item], expected: str | None) -> None:
    """Write over the revision ``expected``; of a longer value no chunk stays."""
    condition = Condition.equal(revision=expected)
    if len(rows) == 1:
        await _remove_chunks(place, await place.table.put(rows[0], condition))
        return
    name = f"metadata {rows[0]['namespace']!r}"
    if sizes(rows) > TRANSACTION_BYTES or len(rows) > TRANSACTION_ITEMS:
        raise RecordTooLarge(name, sizes(rows), TRANSACTION_BYTES)
    at = (rows[0]["pk"], rows[0]["sk"])
    # A revision is of one value, so this is what the condition will meet, or it meets another.
    old = None if expected is None else await place.table.get(at, ("parts",))
    puts = [Action.put(row, name, None if i else condition) for i, row in enumerate(rows)]
    fewer = range(len(rows), 1 if old is None else old.get("parts", 1))
    gone = [Action.delete((at[0], chunk_sk(at[1], i)), name) for i in fewer]
    await place.table.transact([*puts, *gone])


async def _remove_chunks(place: Place, old: Item | None) -> None:
    """Remove the chunks of a value that is gone: its own, not those of one that came since."""
    if old is None:
        return
    own = Condition.equal(revision=old["revision"])
    keys = [(old["pk"], chunk_sk(old["sk"], i)) for i in range(1, old.get("parts", 1))]
    await gather([functools.partial(place.table.delete_if, key, own) for key in keys])


async def delete_value(place: Place, namespace: str, key: str) -> None:
    """Remove; absent is a no-op."""
    at = (value_pk(place.scope, key), value_sk(namespace))
    await _remove_chunks(place, await place.table.delete(at))


async def values_of(place: Place, key: str) -> dict[str, JsonValue]:
    """All values under ``key``, by namespace."""
    for _ in range(_TRIES):
        items = await place.table.query(value_pk(place.scope, key), f"{VALUE}/", behind(VALUE))
        found: dict[str, JsonValue] = {}
        for rows in grouped(items).values():
            own = [row for row in rows if row["revision"] == rows[0]["revision"]]
            if len(own) != rows[0].get("parts", 1):
                break  # written while it was read
            found[rows[0]["namespace"]] = _value(own)
        else:
            return found
    raise BackendUnavailable(f"metadata of {key!r} was written to during each of {_TRIES} reads")


async def delete_values_of(place: Place, key: str) -> bool:
    """Remove all values under ``key``; whether there were any."""
    rows = await place.table.query(
        value_pk(place.scope, key), f"{VALUE}/", behind(VALUE), names=("pk", "sk", "kind")
    )
    await place.table.write_many(deletes=[(row["pk"], row["sk"]) for row in rows])
    return any(row["kind"] == "value" for row in rows)
