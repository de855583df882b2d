"""Metadata: one hash for each key, so that a thread's is beside the thread."""

from __future__ import annotations

from chatkeep.codec import JsonValue, decode, encode
from chatkeep.errors import CorruptRecord
from chatkeep.rules import ANY_REVISION, new_revision
from chatkeep.stores import VersionedValue
from chatkeep_redis.encoded import check_size
from chatkeep_redis.lookups import renew_pointers
from chatkeep_redis.rows import check_format
from chatkeep_redis.space import Space

__all__ = ["delete_value", "get_value", "put_value", "values_of"]


async def get_value(space: Space, namespace: str, key: str) -> VersionedValue | None:
    """Value and revision."""
    _, stored = await space.of_thread("value", key, [space.ttl, "get", namespace])
    return None if stored is None else _value(stored, f"metadata {namespace!r}, {key!r}")


async def put_value(
    space: Space, namespace: str, key: str, value: JsonValue, expected: str | None
) -> str | None:
    """Write if the revision is ``expected``; the new one, or None if it was not."""
    body = encode(value, "value")
    check_size("the value", body)
    revision = new_revision(0)
    wanted = "*" if expected == ANY_REVISION else f"={expected or ''}"
    if expected == "":
        return None  # no revision is empty, and None is what stands for absence
    _, written, due = await space.of_thread(
        "value", key, [space.ttl, "put", namespace, wanted, revision, body]
    )
    await _renew(space, key, due)
    return revision if written == 1 else None


async def delete_value(space: Space, namespace: str, key: str) -> None:
    """Remove; absent is a no-op."""
    _, due = await space.of_thread("value", key, [space.ttl, "delete", namespace])
    await _renew(space, key, due)


async def _renew(space: Space, key: str, due: int) -> None:
    if due == 1:
        await space.best_effort("renewing look-ups", renew_pointers(space, key))


async def values_of(space: Space, key: str) -> dict[str, JsonValue]:
    """All values under a key, by namespace."""
    _, found = await space.of_thread("value", key, [space.ttl, "all"])
    names = [name.decode() for name in found[::2]]
    return {
        name: _value(stored, f"metadata {name!r}, {key!r}").value
        for name, stored in sorted(zip(names, found[1::2], strict=True))
    }


def _value(stored: bytes, what: str) -> VersionedValue:
    try:
        version, revision, body = stored.split(b" ", 2)
    except ValueError as error:
        raise CorruptRecord(what, "has no head") from error
    check_format(version, what)
    return VersionedValue(value=decode(body, what), revision=revision.decode())
