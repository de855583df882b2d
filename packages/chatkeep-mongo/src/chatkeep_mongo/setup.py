"""Setting up: indexes, and the version of the layout. Safe when many processes race."""

from __future__ import annotations

import json
from collections.abc import Mapping

from chatkeep.codec import FORMAT_VERSION
from chatkeep.errors import SchemaOutOfDate
from chatkeep_mongo.bodies import check_format
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.layout import COLLECTIONS, INDEXES, LAYOUT

__all__ = ["check_layout", "check_open", "create", "script"]

_VERSION = "version"


async def create(db: Driver) -> None:
    """Create what is missing. The version is written last: it says that all the rest is there.

    Raises:
        SchemaOutOfDate: a newer chatkeep has been here.
    """
    await check_open(db)
    for name, indexes in INDEXES.items():
        await db.create_indexes(name, indexes)
    await db.insert(LAYOUT, [{"_id": _VERSION, "format": FORMAT_VERSION}])


async def check_open(db: Driver) -> bool:
    """Whether the layout was set up.

    Raises:
        SchemaOutOfDate: it is a newer one than this package reads.
    """
    found = await db.find(LAYOUT, {"_id": _VERSION})
    if found:
        check_format(found[0], "this database")
    return bool(found)


async def check_layout(db: Driver) -> None:
    """Look for every index.

    Raises:
        SchemaOutOfDate: names the collection that lacks one.
    """
    if not await check_open(db):
        raise missing("the chatkeep collections are not there")
    for name, indexes in INDEXES.items():
        wanted = {index.document["name"] for index in indexes}
        lacking = wanted - await db.index_names(name)
        if lacking:
            raise missing(f"collection {name} lacks the index {', '.join(sorted(lacking))}")


def missing(what: str) -> SchemaOutOfDate:
    """The error for a database that was not set up."""
    return SchemaOutOfDate(f"{what}: run `chatkeep migrate URL`", expected=str(FORMAT_VERSION))


def script(database: str) -> str:
    """What :func:`create` does, for the shell ``mongosh``."""
    lines = [f"use {database}"]
    for name in COLLECTIONS:
        for index in INDEXES.get(name, ()):
            document: Mapping[str, object] = index.document
            keys = json.dumps(dict(document["key"]))  # type: ignore[call-overload]
            options = {k: v for k, v in document.items() if k != "key"}
            lines.append(f"db.{name}.createIndex({keys}, {json.dumps(options)})")
    lines.append(f'db.{LAYOUT}.insertOne({{_id: "{_VERSION}", format: {FORMAT_VERSION}}})')
    return "\n".join(lines) + "\n"
