"""How a persistence is made: from a URL, or a client of your own."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from chatkeep.backends import Persistence
from chatkeep.errors import CompositionError
from chatkeep_redis.backend import RedisBackend
from chatkeep_redis.keys import Keys, check_prefix
from chatkeep_redis.runner import Client, Runner
from chatkeep_redis.space import HINT_MS, Space

__all__ = ["open_url", "redis_persistence"]

_PREFIX = "chatkeep"
_LONGEST_MS = 100 * 366 * 24 * 3600 * 1000
_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")


def redis_persistence(
    url_or_client: str | Client,
    *,
    prefix: str | None = None,
    thread_ttl_ms: int | None = None,
    timeout: float | None = 30.0,
    max_connections: int = 50,
) -> Persistence:
    """A persistence in Redis, Valkey or a cluster of them.

    Args:
        url_or_client: ``redis://…``, ``rediss://…`` (TLS), ``redis+cluster://…``,
            ``rediss+cluster://…``, or an asyncio client of redis-py (of a server, a sentinel's
            primary or a cluster), which is neither closed nor reconfigured. Options of redis-py
            may follow in the URL (``?health_check_interval=10``), and ``prefix``.
        prefix: in front of every key; ``chatkeep`` if the URL names none either.
        thread_ttl_ms: milliseconds after its last write at which a thread is gone, with all that
            belongs to it; None: it stays. The same for all processes that share the prefix.
        timeout: seconds for one store call, waiting for a connection included.
        max_connections: calls under way at a time (on a cluster: and connections to each node).

    Raises:
        CompositionError: no URL of Redis, no asyncio client, or an option that cannot be.
    """
    _check_positive("max_connections", max_connections)
    if thread_ttl_ms is not None:
        _check_positive("thread_ttl_ms", thread_ttl_ms)
        if thread_ttl_ms > _LONGEST_MS:
            raise CompositionError(f"thread_ttl_ms must be at most {_LONGEST_MS} (a century)")
    # Callers without a type checker give anything.
    given = cast("object", url_or_client)
    if isinstance(given, str):
        url, named = _without_prefix(given)
        if named is not None and prefix not in (None, named):
            raise CompositionError(f"the prefix is {prefix!r}, but the URL says {named!r}")
        prefix = prefix if named is None else named
        client, owned = _client(url, max_connections, timeout), True
    elif isinstance(given, Redis | RedisCluster):
        client, owned = given, False
    else:
        kind = type(given)
        raise CompositionError(
            f"a URL or a client of redis.asyncio is needed, not {kind.__module__}.{kind.__name__}"
        )
    keys = Keys(check_prefix(_PREFIX if prefix is None else prefix))
    runner = Runner(client, owned=owned, limit=max_connections)
    ttl = thread_ttl_ms or 0
    # An index lives three times as long as a thread: a hint may be no older than a thread gets.
    space = Space(runner, keys, ttl=ttl, hint_ms=min(HINT_MS, ttl or HINT_MS))
    return RedisBackend(space, timeout=timeout).persistence()


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CompositionError(f"{name} must be a positive integer, not {value!r}")


def _without_prefix(url: str) -> tuple[str, str | None]:
    """The URL without our own option, and that."""
    parts = urlsplit(url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    named = [value for name, value in options if name == "prefix"]
    rest = urlencode([(name, value) for name, value in options if name != "prefix"])
    return urlunsplit(parts._replace(query=rest)), named[-1] if named else None


def _client(url: str, max_connections: int, timeout: float | None) -> Client:
    scheme = urlsplit(url).scheme.lower()
    if scheme not in _SCHEMES:
        raise CompositionError(f"not a Redis URL: {scheme or 'no scheme'}://…")
    plain = scheme.removesuffix("+cluster") + url[len(scheme) :]
    # A command that was applied, and whose reply was lost, must not be sent again by the driver:
    # chatkeep knows what may be sent again.
    retry = Retry(NoBackoff(), 0)
    try:
        if scheme.endswith("+cluster"):
            return RedisCluster.from_url(
                plain, retry=retry, max_connections=max_connections, socket_timeout=None
            )
        pool = cast("Any", BlockingConnectionPool).from_url(
            plain,
            retry=retry,
            max_connections=max_connections,
            timeout=timeout,
            socket_timeout=None,
        )
    except (RedisError, ValueError) as error:
        raise CompositionError(f"not a Redis URL: {error}") from error
    return Redis.from_pool(pool)


def open_url(url: str, **options: Any) -> Persistence:
    """The factory behind ``open_persistence("redis://…")`` and its like."""
    return redis_persistence(url, **options)
