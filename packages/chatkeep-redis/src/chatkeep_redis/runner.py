"""Runs scripts on a client: a server, a sentinel's primary, or a cluster.

Everything that is read or written goes through a script, and each argument and answer is bytes:
so it does not matter whether a client decodes what it gets, in which encoding, or which version
of the protocol it speaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.client import NEVER_DECODE
from redis.exceptions import NoScriptError

from chatkeep_redis.errors import is_lost_connection
from chatkeep_redis.rows import check_format
from chatkeep_redis.scripts import ABOUT_A_THREAD, script

__all__ = ["Argument", "Client", "Runner"]

Client: TypeAlias = "Redis | RedisCluster"
Argument: TypeAlias = bytes | str | int

_T = TypeVar("_T")
_R = TypeVar("_R")


class Runner:
    """What all handles of one backend share.

    Args:
        client: neither closed nor reconfigured here, unless it is ``owned``.
        owned: close it in :meth:`close`.
        limit: calls under way at a time; a client's pool refuses what is above its own limit.
    """

    def __init__(self, client: Client, *, owned: bool, limit: int) -> None:
        self.client = client
        self.cluster = isinstance(client, RedisCluster)
        self.in_use = 0
        self._owned = owned
        self._free = asyncio.Semaphore(limit)

    async def run(
        self,
        name: str,
        keys: Sequence[bytes],
        arguments: Sequence[Argument] = (),
        *,
        again: bool = True,
    ) -> Any:
        """The answer of a script.

        ``again``: send it once more after a lost connection (a server that was restarted leaves
        dead ones behind). Every script recognises what it has written itself.

        Raises:
            SchemaOutOfDate: it met what a later version wrote.
        """
        values = [a if isinstance(a, bytes) else str(a).encode() for a in arguments]
        async with self._free:
            self.in_use += 1
            try:
                answer: Any = await self._send(name, keys, values)
            except Exception as error:
                if not (again and is_lost_connection(error)):
                    raise
                answer = await self._send(name, keys, values)
            finally:
                self.in_use -= 1
        if name in ABOUT_A_THREAD and answer[0] == b"format":
            check_format(answer[1], "this thread")
            raise AssertionError("a script refuses later formats only")
        return answer

    async def _send(self, name: str, keys: Sequence[bytes], values: Sequence[bytes]) -> Any:
        if self.cluster:
            # A cluster's client that has to look for its nodes may not be used until it has.
            await self.client.initialize()
        known = script(name)
        options: dict[str, Any] = {NEVER_DECODE: True}
        execute = cast("Any", self.client).execute_command
        try:
            return await execute("EVALSHA", known.sha, len(keys), *keys, *values, **options)
        except NoScriptError:
            return await execute("EVAL", known.text, len(keys), *keys, *values, **options)

    async def each(self, items: Sequence[_T], call: Callable[[_T], Awaitable[_R]]) -> list[_R]:
        """The results of ``call`` for every item, side by side; all are over when one failed."""
        results = await asyncio.gather(*(call(item) for item in items), return_exceptions=True)
        found: list[_R] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        return found

    async def rest(self) -> bool:
        """Drop the connections of a client that was made here; it opens new ones when used again.
        False for a client that was passed in: its connections are not ours."""
        if self._owned:
            await self._disconnect()
        return self._owned

    async def close(self) -> None:
        """Close the client, if it was made here."""
        if self._owned:
            await self._disconnect()
            await self.client.aclose()

    async def _disconnect(self) -> None:
        if isinstance(self.client, RedisCluster):
            # By node: its own aclose() does nothing while it is to look for its nodes again, as
            # after a lost connection.
            nodes: Any = self.client.nodes_manager
            await self.client.aclose()
            await nodes.aclose()
            await nodes.aclose("startup_nodes")
        else:
            await self.client.connection_pool.disconnect()
