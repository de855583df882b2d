"""What users install is what is built here: wheels, in clean virtual environments, with pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from servers import Database
from servers.dynamodb import DynamoTable
from servers.mongo import MongoDatabase
from servers.redis import RedisSpace

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("chatkeep", "chatkeep-sql", "chatkeep-redis", "chatkeep-dynamodb", "chatkeep-mongo")

Run = Callable[..., str]


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Output of a program that must succeed; this environment's packages stay out of it."""
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    return done.stdout


def make_environment(place: Path) -> Path:
    """A new virtual environment; its ``bin``."""
    run(sys.executable, "-m", "venv", place, cwd=place.parent)
    return place / "bin"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of both packages."""
    place = tmp_path_factory.mktemp("wheels")
    programs = make_environment(tmp_path_factory.mktemp("build") / "venv")
    sources = [ROOT / "packages" / name for name in PACKAGES]
    run(programs / "pip", "wheel", "--no-deps", "--wheel-dir", place, *sources, cwd=place)
    return place


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Installs requirements into a clean environment, once each; its ``bin``."""
    known: dict[tuple[str, ...], Path] = {}

    def install(*requirements: str) -> Path:
        if requirements not in known:
            programs = make_environment(tmp_path_factory.mktemp("clean") / "venv")
            run(programs / "pip", "install", "--find-links", wheels, *requirements, cwd=wheels)
            run(programs / "pip", "check", cwd=wheels)
            known[requirements] = programs
        return known[requirements]

    return install


def readme_block(page: Path) -> str:
    """The first Python block of a README."""
    match = re.search(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


def contents(wheels: Path, name: str) -> dict[str, str]:
    """Files of a wheel, as text."""
    [wheel] = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {f: archive.read(f).decode(errors="replace") for f in archive.namelist()}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_has_types_licence_and_code_and_nothing_else(wheels: Path, name: str) -> None:
    files = contents(wheels, name)
    module = name.replace("-", "_")
    assert f"{module}/py.typed" in files
    assert any(f.endswith("licenses/LICENSE") for f in files)
    assert {f.split("/")[0].split("-")[0] for f in files} == {module}
    assert not any("/tests/" in f or f.endswith((".db", ".pyc")) for f in files)


def test_the_sql_wheel_brings_its_migrations(wheels: Path) -> None:
    files = contents(wheels, "chatkeep-sql")
    assert any("/migrations/" in f and f.endswith(".py") for f in files)


def test_the_metadata_says_what_the_packages_are(wheels: Path) -> None:
    [metadata] = [t for f, t in contents(wheels, "chatkeep").items() if f.endswith("METADATA")]
    assert "License-Expression: MIT" in metadata
    assert "Requires-Python: >=3.11" in metadata
    for extra in ("sqlite", "postgres", "redis", "dynamodb", "mongo", "motor", "web", "testkit"):
        assert f"Provides-Extra: {extra}" in metadata


CORE = """
import sys
import chatkeep, chatkeep.engine, chatkeep.persistence, chatkeep.delivery, chatkeep.messages
import chatkeep.testkit.scripted
absent = {"sqlalchemy", "starlette", "alembic", "pytest", "hypothesis"}
assert not absent & set(sys.modules), absent & set(sys.modules)

from chatkeep import open_persistence
from chatkeep.errors import MissingExtra
for url, extra in (
    ("sqlite:///x.db", "sqlite"),
    ("postgresql://h/d", "postgres"),
    ("redis://h", "redis"),
    ("rediss+cluster://h", "redis"),
    ("dynamodb://chats", "dynamodb"),
    ("mongodb://h", "mongo"),
    ("mongodb+srv://h", "mongo"),
):
    try:
        open_persistence(url)
    except MissingExtra as error:
        assert f'pip install "chatkeep[{extra}]"' in str(error), error
    else:
        raise SystemExit(f"{url} was opened without its extra")
try:
    import chatkeep.web
except MissingExtra as error:
    assert 'pip install "chatkeep[web]"' in str(error), error
else:
    raise SystemExit("chatkeep.web was imported without Starlette")
"""


def test_without_extras_the_core_works_and_names_what_is_missing(
    installed: Callable[..., Path], tmp_path: Path
) -> None:
    programs = installed("chatkeep")
    run(programs / "python", "-c", CORE, cwd=tmp_path)
    page = ROOT / "packages" / "chatkeep" / "README.md"
    script = "import asyncio\n\nasync def main():\n" + re.sub(
        "^(?=.)", "    ", readme_block(page), flags=re.MULTILINE
    )
    output = run(programs / "python", "-c", f"{script}\nasyncio.run(main())", cwd=tmp_path)
    assert output.splitlines()[0].endswith("RUN_STARTED")
    assert output.splitlines()[-1].endswith("RUN_FINISHED")


TALK = """

import asyncio
import httpx

async def talk():
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://chat.test") as browser:
        message = {"id": "msg-1", "role": "user", "content": "SCENARIO:server-tool-text"}
        body = {"threadId": "t", "runId": "r", "messages": [message]}
        stream = await browser.post("/api/chat", json=body)
        assert stream.status_code == 200, stream.text
        assert "RUN_FINISHED" in stream.text, stream.text
        page = (await browser.get("/api/chat", params={"threadId": "t"})).json()
    assert page["messages"][0]["id"] == "msg-1", page
    assert any(p["type"] == "tool-call" for m in page["messages"] for p in m["parts"]), page
    await chats.aclose()
    await persistence.aclose()
    print(len(page["messages"]), "messages came back")

asyncio.run(talk())
"""


def test_the_readme_lines_make_a_chat_that_survives_on_sqlite(
    installed: Callable[..., Path], tmp_path: Path
) -> None:
    programs = installed("chatkeep[sqlite,web]", "httpx")
    script = readme_block(ROOT / "README.md") + TALK
    output = run(programs / "python", "-W", "error", "-c", script, cwd=tmp_path)
    assert "messages came back" in output
    assert (tmp_path / "chat.db").exists()


HELLO = """
import asyncio, sys
from chatkeep import open_persistence

async def main():
    async with open_persistence(sys.argv[1]) as persistence:
        await persistence.migrate()
        await persistence.check_schema()
        messages = persistence.stores.messages
        await messages.save_thread("t", [{"id": "m", "role": "user", "content": "Hello"}])
        print((await messages.load_thread("t"))[0]["content"])

asyncio.run(main())
"""


def test_the_postgres_extra_is_all_that_a_server_needs(
    installed: Callable[..., Path], tmp_path: Path, postgres_database: Database
) -> None:
    programs = installed("chatkeep[postgres]")
    for driver in ("psycopg", ""):
        url = postgres_database.url(driver)  # type: ignore[arg-type]
        assert "Hello" in run(programs / "python", "-c", HELLO, url, cwd=tmp_path)


def test_the_redis_extra_is_all_that_a_server_and_a_cluster_need(
    installed: Callable[..., Path],
    tmp_path: Path,
    redis_space: RedisSpace,
    redis_cluster_space: RedisSpace,
) -> None:
    """The scripts are in the wheel."""
    programs = installed("chatkeep[redis]")
    for space in (redis_space, redis_cluster_space):
        assert "Hello" in run(programs / "python", "-c", HELLO, space.url(), cwd=tmp_path)


def test_the_dynamodb_extra_is_all_that_a_server_needs(
    installed: Callable[..., Path], tmp_path: Path, dynamodb_table: DynamoTable
) -> None:
    programs = installed("chatkeep[dynamodb]")
    assert "Hello" in run(programs / "python", "-c", HELLO, dynamodb_table.url(), cwd=tmp_path)


def test_the_mongo_extra_is_all_that_a_server_needs(
    installed: Callable[..., Path], tmp_path: Path, mongo_database: MongoDatabase
) -> None:
    programs = installed("chatkeep[mongo]")
    assert "Hello" in run(programs / "python", "-c", HELLO, mongo_database.url(), cwd=tmp_path)


MOTOR = """
import asyncio, sys
from chatkeep import mongo_persistence
from motor.motor_asyncio import AsyncIOMotorClient

async def main():
    client = AsyncIOMotorClient(sys.argv[1])
    async with mongo_persistence(client, "motor") as persistence:
        await persistence.stores.metadata.set("n", "k", "Hello")
        print(await persistence.stores.metadata.get("n", "k"))
    client.close()

asyncio.run(main())
"""


def test_the_motor_extra_brings_motor(
    installed: Callable[..., Path], tmp_path: Path, mongo_database: MongoDatabase
) -> None:
    programs = installed("chatkeep[motor]")
    assert "Hello" in run(programs / "python", "-c", MOTOR, mongo_database.url(), cwd=tmp_path)


def test_the_command_says_what_it_can_do(installed: Callable[..., Path], tmp_path: Path) -> None:
    programs = installed("chatkeep[sqlite,web]", "httpx")
    assert "migrate" in run(programs / "chatkeep", "--help", cwd=tmp_path)
    url = f"sqlite:///{tmp_path / 'new.db'}"
    assert (
        "create table" in run(programs / "chatkeep", "migrate", url, "--sql", cwd=tmp_path).lower()
    )
    run(programs / "chatkeep", "migrate", url, cwd=tmp_path)
    run(programs / "chatkeep", "check", url, cwd=tmp_path)
