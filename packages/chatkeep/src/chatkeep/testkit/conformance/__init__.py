"""The conformance suite: prove that a persistence keeps every promise of the contract.

A test module of your own, with one fixture, is all it takes::

    from chatkeep.testkit.conformance import *

    skip = {"metadata"}  # what your backend does not have, by name

    @pytest.fixture(scope="module")
    async def persistence():
        async with my_persistence() as persistence:
            yield persistence

Or subclass single classes (``class TestMine(conformance.TestMessages)``) and override the
fixture and ``skip`` there. One persistence may be shared by all cases: each uses ids of its own.

**Declare or fail.** Each of the five stores is tested; one that is missing fails unless
``skip`` names it, and then every case about it is reported as skipped. A tier that is absent
skips by itself, by name; a tier of which only some methods are there fails. ``skip`` takes tiers
too, and ``"ThreadAdmin"``, ``"TurnBackend"``, ``"DeliveryLog"``, ``"LockStore"``,
``"Scope"`` and ``"Maintenance"``.

The cases are async and run under the anyio pytest plugin, which comes with chatkeep; pytest and
hypothesis come with the extra ``chatkeep[testkit]``.
"""

from __future__ import annotations

import importlib.util

from chatkeep.errors import MissingExtra

if any(importlib.util.find_spec(name) is None for name in ("pytest", "hypothesis")):
    raise MissingExtra("chatkeep.testkit.conformance", "testkit")

import pytest

# Failed asserts of the cases show their values, as those of a test module do.
for _name in (
    "activities",
    "admin",
    "base",
    "claims",
    "commits",
    "concurrency",
    "cuts",
    "edges",
    "interrupts",
    "leases",
    "listed",
    "locks",
    "logs",
    "maintenance",
    "messages",
    "metadata",
    "revisions",
    "runs",
    "scope",
    "shape",
    "turns",
    "values",
    "turnkit",
):
    pytest.register_assert_rewrite(f"{__name__}._{_name}")

from chatkeep.testkit.conformance._activities import TestActivities  # noqa: E402
from chatkeep.testkit.conformance._admin import TestThreadAdmin  # noqa: E402
from chatkeep.testkit.conformance._base import ConformanceCase, Ids  # noqa: E402
from chatkeep.testkit.conformance._claims import TestClaims  # noqa: E402
from chatkeep.testkit.conformance._commits import TestCommits  # noqa: E402
from chatkeep.testkit.conformance._concurrency import TestConcurrency  # noqa: E402
from chatkeep.testkit.conformance._cuts import TestCutArchive  # noqa: E402
from chatkeep.testkit.conformance._edges import TestEdges  # noqa: E402
from chatkeep.testkit.conformance._interrupts import TestBatchCommit, TestInterrupts  # noqa: E402
from chatkeep.testkit.conformance._leases import TestDrafts, TestLeases  # noqa: E402
from chatkeep.testkit.conformance._locks import TestLockStore  # noqa: E402
from chatkeep.testkit.conformance._logs import TestDeliveryLog  # noqa: E402
from chatkeep.testkit.conformance._maintenance import TestMaintenance  # noqa: E402
from chatkeep.testkit.conformance._messages import TestMessages  # noqa: E402
from chatkeep.testkit.conformance._metadata import TestMetadata, TestVersionedMetadata  # noqa: E402
from chatkeep.testkit.conformance._revisions import TestPagedMessages, TestRevisionedMessages  # noqa: E402
from chatkeep.testkit.conformance._runs import (  # noqa: E402
    TestReclaimableRuns,
    TestRunHistory,
    TestRuns,
    TestRunTree,
)
from chatkeep.testkit.conformance._scope import TestScope  # noqa: E402
from chatkeep.testkit.conformance._shape import TestShape  # noqa: E402
from chatkeep.testkit.conformance._turns import TestTurnBackend  # noqa: E402
from chatkeep.testkit.conformance._values import TestValues  # noqa: E402

__all__ = [
    "ConformanceCase",
    "Ids",
    "TestActivities",
    "TestBatchCommit",
    "TestClaims",
    "TestCommits",
    "TestConcurrency",
    "TestCutArchive",
    "TestDeliveryLog",
    "TestDrafts",
    "TestEdges",
    "TestInterrupts",
    "TestLeases",
    "TestLockStore",
    "TestMaintenance",
    "TestMessages",
    "TestMetadata",
    "TestPagedMessages",
    "TestReclaimableRuns",
    "TestRevisionedMessages",
    "TestRunHistory",
    "TestRunTree",
    "TestRuns",
    "TestScope",
    "TestShape",
    "TestThreadAdmin",
    "TestTurnBackend",
    "TestValues",
    "TestVersionedMetadata",
]
