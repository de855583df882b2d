"""How a persistence is made: from a URL, or a client of your own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from pymongo import AsyncMongoClient
from pymongo.errors import ConfigurationError, InvalidURI

from chatkeep.backends import Persistence
from chatkeep.errors import CompositionError
from chatkeep_mongo.backend import MongoBackend
from chatkeep_mongo.driver import Driver, MotorDriver

if TYPE_CHECKING:
    from motor.motor_asyncio import AsyncIOMotorClient

__all__ = ["mongo_persistence", "open_url"]

_DATABASE = "chatkeep"
_SELECTION_MS = 5000
"""How long a client made from a URL looks for a primary before it says that there is none: a commit
is sent again then, and a call has 30 seconds for all of it."""


def mongo_persistence(
    url_or_client: str | AsyncMongoClient[Any] | AsyncIOMotorClient[Any],
    database: str | None = None,
    *,
    create: bool = True,
    timeout: float | None = 30.0,
) -> Persistence:
    """A persistence in MongoDB: standalone, a replica set or sharded, with the same guarantees.

    Args:
        url_or_client: ``mongodb://…``, ``mongodb+srv://…``, PyMongo's ``AsyncMongoClient`` or
            Motor's ``AsyncIOMotorClient``. A client is neither closed nor reconfigured; whatever it
            was set to, reads go to the primary and writes wait for a majority and the journal.
        database: where the collections are; None: the one in the URL, else ``chatkeep``.
        create: create the indexes on first use if there are none.
        timeout: seconds for one store call, waiting for a server included.

    Raises:
        CompositionError: no URL of MongoDB, no asyncio client, or a name that no database may have.
    """
    driver: Driver
    given = cast("object", url_or_client)
    owned = isinstance(given, str)
    if isinstance(given, str):
        make, named = _client(given)
        name = _checked(database or named or _DATABASE)
        try:
            driver = Driver(make, name)
        except (InvalidURI, ConfigurationError, ValueError) as error:
            # Its text may hold the URL, and that a password.
            raise CompositionError(f"not a MongoDB URL: {type(error).__name__}") from None
    else:
        name = _checked(database or _DATABASE)
        driver = _driver(given, name)
    return MongoBackend(
        driver, database=name, create=create, owned=owned, timeout=timeout
    ).persistence()


def open_url(url: str, **options: Any) -> Persistence:
    """The factory behind ``open_persistence("mongodb://…")``."""
    return mongo_persistence(url, **options)


def _driver(client: object, database: str) -> Driver:
    if isinstance(client, AsyncMongoClient):
        return Driver(cast("AsyncMongoClient[dict[str, Any]]", client), database)
    # Motor is not imported: whoever has a client of it has.
    motor: Any = sys.modules.get("motor.motor_asyncio")
    if motor is not None and isinstance(client, motor.AsyncIOMotorClient):
        return MotorDriver(cast("Any", client), database)
    raise CompositionError(
        f"a MongoDB persistence takes a URL, an AsyncMongoClient of PyMongo or an "
        f"AsyncIOMotorClient of Motor, not {type(client).__module__}.{type(client).__name__}"
    )


def _client(url: str) -> tuple[Callable[[], AsyncMongoClient[dict[str, Any]]], str | None]:
    """What makes a client of our own, and the database that the URL names."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise CompositionError("not a MongoDB URL: its host cannot be read") from None
    if parts.scheme.lower() not in {"mongodb", "mongodb+srv"}:
        raise CompositionError(f"not a MongoDB URL: {parts.scheme}://…")
    options: dict[str, Any] = {}
    if "serverselectiontimeoutms=" not in parts.query.lower():
        options["serverSelectionTimeoutMS"] = _SELECTION_MS
    return partial(AsyncMongoClient, url, **options), unquote(parts.path.strip("/")) or None


_NO_NAME = re.compile(r'[/\\. "$\x00]')


def _checked(name: str) -> str:
    if not name or len(name.encode()) > 63 or _NO_NAME.search(name):
        raise CompositionError(f"no database can be called {name!r}")
    return name
