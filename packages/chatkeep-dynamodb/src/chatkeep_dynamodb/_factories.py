"""How a persistence is made: from a table's name and a client, or from a URL."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from chatkeep.backends import Persistence
from chatkeep.errors import CompositionError
from chatkeep_dynamodb.backend import DynamoDBBackend
from chatkeep_dynamodb.client import ClientSource

__all__ = ["dynamodb_persistence", "open_url"]

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}\Z")
_ARN = re.compile(r"arn:[^:]+:dynamodb:[^:]*:[^:]*:table/[A-Za-z0-9_.-]{3,255}\Z")
_PARAMETERS = ("region", "endpoint")


def dynamodb_persistence(
    table: str,
    *,
    client: Any = None,
    region: str | None = None,
    endpoint_url: str | None = None,
    create: bool = True,
    timeout: float | None = 30.0,
    threads: int = 32,
) -> Persistence:
    """A persistence in one DynamoDB table.

    Args:
        table: its name, or its ARN.
        client: a boto3 client of DynamoDB, ``boto3.client("dynamodb")``, which is neither closed
            nor reconfigured; None: one is made on first use, with boto3's usual credentials.
        region: of the client that is made; None: as boto3 finds it.
        endpoint_url: of the client that is made: a local server, a VPC endpoint.
        create: create the table on first use if there is none (on-demand billing). Needs
            ``dynamodb:DescribeTable`` even if there is one; without ``create`` nothing is looked
            at before it is used.
        timeout: seconds for one store call, all its requests included.
        threads: requests at once; boto3 waits for each in a worker thread. A client that is
            passed in allows no more than its ``max_pool_connections``.

    Raises:
        CompositionError: no name of a table, no client of DynamoDB, or a client together with
            what only a client that is made would use.
    """
    name: Any = table
    if not isinstance(name, str) or not (_TABLE.match(name) or _ARN.match(name)):
        raise CompositionError(
            f"{name!r} is no name of a table: 3 to 255 letters, digits, '_', '-' and '.'"
        )
    if threads < 1:
        raise CompositionError("threads must be at least 1")
    if client is not None:
        service = getattr(getattr(client, "meta", None), "service_model", None)
        if getattr(service, "service_name", None) != "dynamodb":
            raise CompositionError(
                f'client must be boto3.client("dynamodb"), not {type(client).__name__}'
            )
        if region is not None or endpoint_url is not None:
            raise CompositionError("region and endpoint_url belong to a client that is made here")
    source = ClientSource(client, region=region, endpoint_url=endpoint_url, threads=threads)
    return DynamoDBBackend(name, source, create=create, timeout=timeout).persistence()


def open_url(url: str, **options: Any) -> Persistence:
    """The factory behind ``open_persistence("dynamodb://table?region=…&endpoint=…")``.

    Raises:
        CompositionError: a URL that is not of this form.
    """
    parts = urlsplit(url)
    # Not parts.hostname: the names of tables have capitals.
    table = unquote(parts.netloc)
    if parts.scheme != "dynamodb" or not table or parts.path.strip("/") or parts.fragment:
        raise CompositionError(
            "a DynamoDB URL is dynamodb://table, with ?region=… and &endpoint=… behind it"
        )
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(given) - set(_PARAMETERS))
    if unknown:
        raise CompositionError(
            f"{unknown[0]!r} means nothing in a DynamoDB URL: it takes {' and '.join(_PARAMETERS)}"
        )
    for parameter, option in (("region", "region"), ("endpoint", "endpoint_url")):
        if given.get(parameter):
            options.setdefault(option, given[parameter])
    return dynamodb_persistence(table, **options)
