"""Runs the Python blocks of a Markdown page, top to bottom, as one program.

A block with ``title="test_….py"`` is a test module: pytest runs it, in a process of its own.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["ROOT", "blocks", "pages", "run_page"]

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(
    r"^(?P<indent> *)```python(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```\s*$",
    re.DOTALL | re.MULTILINE,
)


_TEST_MODULE = re.compile(r'title="(test_\w+\.py)"')


def pages() -> list[Path]:
    """Every page that has at least one Python block."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
    return sorted(page for page in found if any(blocks(page)))


class Block(NamedTuple):
    """Line number of the first line, what stands behind ``python``, and the code."""

    line: int
    info: str
    code: str


def blocks(page: Path) -> Iterator[Block]:
    """The Python blocks of a page."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(line, match["info"], textwrap.dedent(match["code"]))


async def run_page(page: Path) -> dict[str, Any]:
    """Run the blocks in one namespace; ``await`` may stand at the top level.

    Returns the namespace. Errors point into the page: code keeps its line numbers.
    """
    # A module of its own: dataclasses and pydantic look annotations up in sys.modules.
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    try:
        for line, info, code in blocks(page):
            if title := _TEST_MODULE.search(info):
                _run_tests(title[1], code)
                continue
            tree = ast.parse("\n" * (line - 1) + code, str(page))
            program = compile(tree, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(program, module.__dict__)  # noqa: S307 - our own pages
            if inspect.iscoroutine(result):
                await result
        await asyncio.sleep(0)
    finally:
        del sys.modules[module.__name__]
    return module.__dict__


def _run_tests(name: str, code: str) -> None:
    Path(name).write_text(code)
    Path("pytest.ini").write_text("[pytest]\n")  # the module stands alone, as a user's would
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-4_000:]
