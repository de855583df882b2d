"""Times are epoch milliseconds: neither the host's zone nor the database's changes one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from chatkeep.records import InterruptRecord, RunPatch

pytestmark = pytest.mark.anyio

GIVEN = (0, 1_711_846_799_999, 1_711_846_800_000, 1_793_494_800_000)
"""1970, both sides of a change to daylight saving time, and of one back."""


@pytest.fixture(params=["UTC", "Asia/Kolkata", "America/New_York", "Pacific/Kiritimati"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The time zone of this process."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.parametrize(
    ("kind", "database_zone"),
    [
        pytest.param("sqlite", "", marks=pytest.mark.sqlite),
        pytest.param("psycopg", "Asia/Tokyo", marks=pytest.mark.postgres),
        pytest.param("asyncpg", "America/St_Johns", marks=pytest.mark.postgres),
    ],
)
async def test_no_zone_shifts_a_time(
    opened: Any, request: pytest.FixtureRequest, zone: str, kind: str, database_zone: str
) -> None:
    if database_zone:
        database: Any = request.getfixturevalue("postgres_database")
        database.server.execute(f"alter database {database.name} set timezone to '{database_zone}'")
    async with opened(kind) as persistence:
        runs, interrupts = persistence.stores.runs, persistence.stores.interrupts
        for number, given in enumerate(GIVEN):
            await runs.create_or_resume(f"r{number}", "t", started_at=given)
            await runs.update(f"r{number}", RunPatch(status="failed", finished_at=given + 1))
            found = await runs.get(f"r{number}")
            assert (found.started_at, found.finished_at) == (given, given + 1)
            record = InterruptRecord(
                interrupt_id=f"i{number}",
                run_id="r0",
                thread_id="t",
                requested_at=given,
                payload={},
            )
            await interrupts.create(record)
        assert [r.requested_at for r in await interrupts.list("t")] == list(GIVEN)
        await interrupts.resolve("t", "i0", {"approved": True})
        leased = await runs.create_or_resume(
            "leased", "t", started_at=1, lease_token="x", lease_ms=60_000
        )
        (info,) = (await persistence.list_threads()).threads
        settled = await interrupts.get("t", "i0")
        now = time.time_ns() // 1_000_000
        for clock in (
            leased.lease.until - 60_000,
            settled.resolved_at,
            info.created_at,
            info.updated_at,
        ):
            assert abs(clock - now) < 60_000
        assert await runs.find_active_run("t") == leased
