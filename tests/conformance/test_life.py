"""The life of a persistence: first use by many, and use after the end."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from typing_extensions import get_protocol_members

from chatkeep import Persistence
from chatkeep.compose import STORE_PROTOCOLS, STORE_TIERS
from chatkeep.errors import StoreClosed
from chatkeep.records import RunPatch
from chatkeep.scope import Scope
from chatkeep.stores import ThreadAdmin
from chatkeep.testkit.conformance._base import activity, gather, interrupt, user
from conformance.columns import fresh  # noqa: F401

pytestmark = pytest.mark.anyio

_ARGUMENTS: dict[str, Any] = {
    "thread_id": "t",
    "run_id": "r",
    "interrupt_id": "i",
    "namespace": "n",
    "key": "k",
    "value": 1,
    "messages": [user("a")],
    "tail": [user("a")],
    "keep": 0,
    "expected": "",
    "limit": 5,
    "cut_id": "c",
    "before": 1,
    "started_at": 1,
    "patch": RunPatch(cancel_requested=True),
    "parent_run_id": "r",
    "parent_run_ids": ["r"],
    "now": 1,
    "ttl_ms": 0,
    "record": interrupt("t", "r", "i"),
    "answers": [],
    "activities": [activity("a")],
    "message_ids": ["m"],
}


def _call(owner: Any, name: str) -> Any:
    """Call a method with an argument for each parameter that needs one."""
    method = getattr(owner, name)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in inspect.signature(method).parameters.values():
        if parameter.default is not inspect.Parameter.empty and parameter.name != "before":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            named[parameter.name] = _ARGUMENTS[parameter.name]
        else:
            positional.append(_ARGUMENTS[parameter.name])
    return method(*positional, **named)


async def test_every_method_of_a_closed_persistence_says_so(
    fresh: Persistence,  # noqa: F811
) -> None:
    """StoreClosed from every method of every store, tier and view; nothing else, nothing written.

    ``commit_batch`` of an empty batch asks nothing of the backend and is left out.
    """
    stores: Any = fresh.stores
    await stores.messages.save_thread("t", [user("a")])
    scoped = fresh.scoped(Scope(tenant_id="a"))
    await fresh.aclose()
    await fresh.aclose()
    owners: list[tuple[Any, type]] = [(fresh, ThreadAdmin)]
    for bag in (fresh, scoped):
        for key, store in bag.stores.present().items():
            owners += [(store, p) for p in (STORE_PROTOCOLS[key], *STORE_TIERS[key])]
    called = 0
    for owner, protocol in owners:
        for name in sorted(get_protocol_members(protocol) - {"commit_batch"}):
            with pytest.raises(StoreClosed):
                await _call(owner, name)
            called += 1
    for life in (fresh.ping, fresh.migrate, fresh.check_schema):
        with pytest.raises(StoreClosed):
            await life()
    assert called > 60


async def test_the_first_calls_may_all_come_at_once(fresh: Persistence) -> None:  # noqa: F811
    """Twenty callers meet an empty database: all succeed, nothing is lost."""
    stores: Any = fresh.stores
    await gather(
        [stores.messages.save_thread(f"t{n}", [user("a", f"m{n}")]) for n in range(10)]
        + [stores.runs.create_or_resume(f"r{n}", "t", started_at=n) for n in range(10)]
    )
    assert len(await stores.runs.list_by_thread("t")) == 10
    for n in range(10):
        assert await stores.messages.load_thread(f"t{n}") == [user("a", f"m{n}")]


async def test_setting_up_again_keeps_what_is_there(fresh: Persistence) -> None:  # noqa: F811
    """migrate() is idempotent, alone and from many at once; check_schema() agrees."""
    stores: Any = fresh.stores
    await stores.messages.save_thread("t", [user("a")])
    await asyncio.gather(*(fresh.migrate() for _ in range(3)))
    await fresh.check_schema()
    await fresh.ping()
    assert await stores.messages.load_thread("t") == [user("a")]
