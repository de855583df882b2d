"""The command ``chatkeep``: set up and tend a store from a shell.

* ``chatkeep migrate URL``: create or upgrade what the store needs
* ``chatkeep migrate URL --sql``: print what that would run, for review
* ``chatkeep check URL``: whether the store is up, and as this version reads it
* ``chatkeep sweep URL``: end the runs whose process died
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from chatkeep.backends import Persistence, open_persistence
from chatkeep.errors import ChatkeepError, CompositionError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Errors of ours are one line on standard error."""
    given = _parser().parse_args(arguments)
    # Only ``migrate`` makes anything: looking at a store must not create it.
    looks = given.command != "migrate" and _sql(given.url)
    options: dict[str, Any] = {"create": False} if looks else {}
    if given.schema is not None:
        options["schema"] = given.schema
    try:
        persistence = open_persistence(given.url, **options)
        return asyncio.run(_run(given, persistence))
    except ChatkeepError as error:
        print(f"chatkeep: {error}", file=sys.stderr)
        return 1


def _sql(url: str) -> bool:
    return url.partition(":")[0].partition("+")[0] in {"sqlite", "postgresql", "postgres"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chatkeep", description="Set up and tend a store of chats.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("url", help="sqlite:///chat.db, postgresql+psycopg://host/database, …")
        added.add_argument("--schema", help="PostgreSQL schema of the tables")
        return added

    migrate = command("migrate", "Create or upgrade what the store needs.")
    migrate.add_argument("--sql", action="store_true", help="print the statements, run nothing")
    command("check", "Tell whether the store is up, and as this version reads it.")
    sweep = command("sweep", "End the runs whose process died, and list them.")
    sweep.add_argument("--limit", type=int, default=100, help="most runs of one call")
    return parser


async def _run(given: argparse.Namespace, persistence: Persistence) -> int:
    async with persistence:
        if given.command == "migrate" and given.sql:
            print(_review(persistence))
        elif given.command == "migrate":
            await persistence.migrate()
        elif given.command == "check":
            await persistence.check_schema()
            await persistence.ping()
            print("ok")
        else:
            for lost in await persistence.maintenance().sweep(limit=given.limit):
                print(f"{lost.run.thread_id}\t{lost.run.run_id}\t{lost.run.status}")
    return 0


def _review(persistence: Persistence) -> str:
    scripts = [script for b in persistence.backends if (script := b.setup_script()) is not None]
    if not scripts:
        raise CompositionError("this store needs no set-up: there is nothing to print")
    return "\n".join(scripts)


if __name__ == "__main__":
    sys.exit(main())
