"""Every backend beside memory: 200 random sequences of 50 calls, the same answers."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient

from chatkeep import Persistence, memory_persistence
from chatkeep.testkit.state_machine import StateMachineReport, run_state_machine
from chatkeep_dynamodb import open_url as open_dynamodb
from chatkeep_mongo import mongo_persistence
from chatkeep_redis import redis_persistence
from chatkeep_sql import postgres_persistence, sqlite_persistence
from conformance.mongo_clients import MongoClientKind
from servers import Postgres
from servers.dynamodb import DynamoDB
from servers.mongo import MongoServer
from servers.postgres import PostgresDriver
from servers.redis import RedisServer

EXAMPLES, STEPS = 200, 50
SEED = None if os.environ.get("CHATKEEP_TEST_EXPLORE") else 20_261_130
"""The same sequences in each run, unless new ones are asked for."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def prove(report: StateMachineReport) -> None:
    assert report.examples >= EXAMPLES
    assert report.steps >= EXAMPLES * STEPS


@pytest.mark.memory
def test_memory_answers_as_memory_does() -> None:
    """The machine itself: two memory backends never differ, whatever is drawn."""
    prove(
        run_state_machine(
            memory_persistence,
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            random_seed=SEED,
        )
    )


@pytest.mark.sqlite
def test_sqlite_answers_as_memory_does(tmp_path: Path) -> None:
    """SQLite gives the results and errors of the reference backend."""
    prove(
        run_state_machine(
            lambda: sqlite_persistence(tmp_path / "chatkeep.db"),
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            random_seed=SEED,
        )
    )


@pytest.mark.postgres
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_postgresql_answers_as_memory_does(postgres: Postgres, driver: PostgresDriver) -> None:
    """PostgreSQL gives the results and errors of the reference backend, with both drivers."""
    with postgres.database() as database:
        prove(
            run_state_machine(
                lambda: postgres_persistence(database.url(driver)),
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                random_seed=SEED,
                name=f"postgres ({driver})",
            )
        )


@pytest.mark.redis
@pytest.mark.parametrize("fixture", ["redis_server", "redis_cluster"])
def test_redis_answers_as_memory_does(request: pytest.FixtureRequest, fixture: str) -> None:
    """A server and a cluster give the results and errors of the reference backend."""
    server: RedisServer = request.getfixturevalue(fixture)
    with ExitStack() as stack:
        prove(
            run_state_machine(
                lambda: redis_persistence(stack.enter_context(server.space()).url()),
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                random_seed=SEED,
                name=fixture,
            )
        )


@pytest.mark.dynamodb
def test_dynamodb_answers_as_memory_does(dynamodb: DynamoDB) -> None:
    """DynamoDB gives the results and errors of the reference backend."""
    with dynamodb.table() as table:
        prove(
            run_state_machine(
                lambda: open_dynamodb(table.url()),
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                random_seed=SEED,
            )
        )


@pytest.mark.mongo
@pytest.mark.parametrize("client", ["mongo", "motor"])
def test_mongodb_answers_as_memory_does(mongo: MongoServer, client: MongoClientKind) -> None:
    """MongoDB gives the results and errors of the reference backend, with both clients."""
    with mongo.database() as database, ExitStack() as stack:

        def make() -> Persistence:
            if client == "mongo":
                return mongo_persistence(database.url())
            motor: AsyncIOMotorClient[Any] = AsyncIOMotorClient(database.url())
            stack.callback(motor.close)
            return mongo_persistence(motor, database.name)

        prove(
            run_state_machine(
                make,
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                random_seed=SEED,
                name=client,
            )
        )
