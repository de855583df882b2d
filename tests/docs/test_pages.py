"""What the documentation shows is what happens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from chatkeep import errors
from docs.pages import ROOT, blocks, pages, run_page
from servers import Database
from servers.dynamodb import DynamoDB
from servers.mongo import MongoDatabase
from servers.redis import RedisSpace

pytestmark = [pytest.mark.docs, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
async def test_every_python_block_of_a_page_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    postgres_database: Database,
    redis_space: RedisSpace,
    dynamodb: DynamoDB,
    mongo_database: MongoDatabase,
) -> None:
    """In an empty directory; ``DATABASE_URL`` names an empty PostgreSQL database, ``REDIS_URL`` a
    Redis server, ``MONGO_URL`` an empty MongoDB database, ``DYNAMODB_ENDPOINT`` a DynamoDB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", postgres_database.url("psycopg"))
    monkeypatch.setenv("REDIS_URL", redis_space.server.url())
    monkeypatch.setenv("AWS_DEFAULT_REGION", dynamodb.region)
    if endpoint := dynamodb.endpoint():
        monkeypatch.setenv("DYNAMODB_ENDPOINT", endpoint)
    monkeypatch.setenv("MONGO_URL", mongo_database.url())
    await run_page(page)


def test_the_pages_that_people_read_first_are_among_them() -> None:
    names = {str(page.relative_to(ROOT)) for page in pages()}
    assert {"README.md", "docs/quickstart.md", "packages/chatkeep/README.md"} <= names


def test_a_failing_block_fails_and_names_its_line(tmp_path: Path) -> None:
    """The runner itself: a page that lies does not pass."""
    page = tmp_path / "page.md"
    page.write_text("Text\n\n```python\nx = 1\n```\n\n    ```python\n    assert x == 2\n    ```\n")
    assert [block.line for block in blocks(page)] == [4, 8]
    with pytest.raises(AssertionError) as failure:
        asyncio.run(run_page(page))
    assert failure.traceback[-1].lineno == 7  # counted from 0


def test_every_session_that_the_documentation_names_exists() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    sessions = set(re.findall(r'name="([\w-]+)"', noxfile))
    sessions |= set(re.findall(r"^def (\w+)\(session", noxfile, re.MULTILINE))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for name in re.findall(r"nox -s ([\w-]+)", page.read_text()):
            assert name.partition("-3.")[0] in sessions, f"{page.name} names {name}"


def test_every_error_and_its_code_are_explained() -> None:
    page = (ROOT / "docs" / "guides" / "errors.md").read_text()
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.ChatkeepError):
            assert f"`{name}`" in page
            assert f"`{kind.code}`" in page


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("**/*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in navigation
