"""Every check of the workspace. ``nox`` alone runs all of them on the running Python.

    nox -s tests-sqlite          one session
    nox -s tests-memory -- -k merge -x    with pytest's own options
    nox -s python-3.13           the test sessions on another Python
    nox -l                       what there is

A session installs what it needs. Nothing is skipped: a session that lacks something fails and
says how to get it. Tests that need a server start one of their own unless a
variable names one: ``CHATKEEP_TEST_POSTGRES_URL``, ``CHATKEEP_TEST_REDIS_URL``,
``CHATKEEP_TEST_REDIS_CLUSTER_URL``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
EDITABLE = (
    "--editable", "packages/chatkeep[web,testkit]",
    "--editable", "packages/chatkeep-sql[sqlite,postgres,asyncpg]",
    "--editable", "packages/chatkeep-redis",
    "--editable", "packages/chatkeep-dynamodb",
    "--editable", "packages/chatkeep-mongo[motor]",
)  # fmt: skip

APART = ("docs", "packaging", "node")
"""Markers of tests that have a session of their own, whatever backend they use."""

SUITES = {
    "memory": "not sqlite and not postgres and not redis and not dynamodb and not mongo",
    "sqlite": "sqlite and not postgres and not redis and not dynamodb and not mongo",
    "postgres": "postgres and not redis and not dynamodb and not mongo",
    "redis": "redis and not dynamodb and not mongo",
    "dynamodb": "dynamodb and not mongo",
    "mongo": "mongo",
}
"""Marker expressions that share out the other tests: each runs in exactly one session."""


def install(session: nox.Session, *groups: str, editable: bool = True) -> None:
    """The workspace's packages and the dependency groups that a session needs."""
    wanted = [option for group in groups for option in ("--group", group)]
    session.install(*wanted, *(EDITABLE if editable else ()))


def pytest(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run pytest with the session's own options behind ours."""
    session.run("python", "-m", "pytest", *arguments, *session.posargs, env=env)


def suite(session: nox.Session, name: str) -> None:
    """One share of the tests."""
    apart = " and ".join(f"not {marker}" for marker in APART)
    pytest(session, "-m", f"({SUITES[name]}) and {apart}")


# ----------------------------------------------------------------------------- static checks


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format and the direction of imports."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")


@nox.session
def types(session: nox.Session) -> None:
    """Two type checkers, both strict."""
    install(session, "types")
    session.run("mypy")
    session.run("pyright")


# ------------------------------------------------------------------------------------- tests


@nox.session(name="tests-memory")
def tests_memory(session: nox.Session) -> None:
    """Everything that needs no database."""
    install(session, "test")
    suite(session, "memory")


@nox.session(name="tests-sqlite")
def tests_sqlite(session: nox.Session) -> None:
    """What runs on SQLite files."""
    install(session, "test")
    suite(session, "sqlite")


@nox.session(name="tests-postgres")
def tests_postgres(session: nox.Session) -> None:
    """What runs on PostgreSQL, with psycopg and with asyncpg."""
    install(session, "test", "postgres")
    suite(session, "postgres")


@nox.session(name="tests-redis")
def tests_redis(session: nox.Session) -> None:
    """What runs on a Redis server and on a cluster of three."""
    install(session, "test", "redis")
    suite(session, "redis")


@nox.session(name="tests-dynamodb")
def tests_dynamodb(session: nox.Session) -> None:
    """What runs on DynamoDB: on moto, and on dynalite for the limits of the service."""
    install(session, "test", "dynamodb", "node")
    dynalite(session)
    suite(session, "dynamodb")


@nox.session(name="tests-mongo")
def tests_mongo(session: nox.Session) -> None:
    """What runs on MongoDB, with PyMongo and with Motor."""
    install(session, "test", "mongo")
    suite(session, "mongo")


@nox.session(name="tests-wire")
def tests_wire(session: nox.Session) -> None:
    """The official AG-UI client, in Node, against our stream."""
    install(session, "test", "postgres", "redis", "dynamodb", "mongo", "node")
    modules = node_modules(session, ROOT / "tests" / "wire")
    env = {"CHATKEEP_TEST_NODE_MODULES": str(modules)}
    pytest(session, "tests/wire", "tests/e2e", "-m", "node", env=env)


def dynalite(session: nox.Session) -> None:
    """Let the session's tests find dynalite."""
    modules = node_modules(session, ROOT / "tests" / "servers" / "dynalite")
    session.env["CHATKEEP_TEST_DYNALITE_MODULES"] = str(modules)


def node_modules(session: nox.Session, folder: Path) -> Path:
    """Install the npm packages that ``folder`` locks, beside the session's own."""
    # npm comes from the session's packages too: no Node.js on the machine is needed.
    place = Path(session.virtualenv.location) / "npm"
    place.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(folder / name, place)
    with session.chdir(place):
        session.run("npm", "ci", "--no-audit", "--no-fund")
    return place / "node_modules"


@nox.session(name="tests-docs")
def tests_docs(session: nox.Session) -> None:
    """Every Python block of README and docs runs."""
    install(session, "test", "postgres", "redis", "dynamodb", "mongo", "demo")
    pytest(session, "tests/docs")


@nox.session(name="tests-packaging")
def tests_packaging(session: nox.Session) -> None:
    """Wheels, built and installed with pip into clean virtual environments."""
    install(session, "test", "postgres", "redis", "dynamodb", "mongo", editable=False)
    pytest(session, "tests/wheels")


@nox.session(name="tests-lowest")
def tests_lowest(session: nox.Session) -> None:
    """The oldest versions of direct dependencies that the packages claim to work with."""
    names = ("test", "redis", "dynamodb", "mongo", "node")
    groups = [option for name in names for option in ("--group", name)]
    session.install("--resolution", "lowest-direct", *groups, *EDITABLE)
    dynalite(session)
    # What meets the dependencies; races, crashes and long runs are the other sessions' work.
    where = [
        "packages",
        "tests/conformance/test_sqlite.py",
        "tests/e2e/test_chat.py",
        "tests/e2e/test_examples.py",
    ]
    pytest(session, *where, "-m", "not postgres and not slow and not node")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site, into ``site/``; a broken link or reference is an error."""
    install(session, "docs")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """A chat server on a SQLite file, killed while paused and in an answer, and what came back."""
    install(session, "demo")
    session.run("python", "examples/demo.py", *session.posargs)


# ------------------------------------------------------------------- not part of plain ``nox``


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Cost of a boundary, a turn and a reload, beside the bare drivers; prints tables."""
    install(session, "test", "postgres", "redis", "dynamodb", "mongo")
    session.run("python", "-m", "bench", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """All test suites with coverage, and a report of the lines that no test reached."""
    install(session, "test", "postgres", "redis", "dynamodb", "mongo", "node")
    dynalite(session)
    session.run("coverage", "erase")
    apart = " and ".join(f"not {marker}" for marker in APART)
    session.run("coverage", "run", "-m", "pytest", "-m", apart, *session.posargs)
    session.run("coverage", "combine")
    session.run("coverage", "report")


@nox.session(python=["3.11", "3.12", "3.13", "3.14"], default=False)
def python(session: nox.Session) -> None:
    """All suites on a named Python; fails where that Python is missing."""
    install(session, "test", "postgres", "redis", "dynamodb", "mongo", "node")
    dynalite(session)
    for name in SUITES:
        suite(session, name)
