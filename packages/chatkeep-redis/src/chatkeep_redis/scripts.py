"""The Lua scripts, by name: each is what stands in ``lua/<name>.lua``.

Those about a thread (:data:`ABOUT_A_THREAD`) have ``common.lua`` in front. A script never
decodes or encodes JSON: Lua would change big integers and empty lists.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["ABOUT_A_THREAD", "ELSEWHERE", "Script", "script"]

ABOUT_A_THREAD = (
    "commit",
    "cuts",
    "delete",
    "draft",
    "drafts",
    "erase",
    "forget",
    "lease",
    "page",
    "pointers",
    "purge",
    "renewed",
    "runs",
    "value",
    "view",
)
ELSEWHERE = ("children", "heads", "index", "lock", "log", "owner", "ping")


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and the name under which a server that has seen it knows it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """The script of this name."""
    folder = files("chatkeep_redis") / "lua"
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    if name in ABOUT_A_THREAD:
        text = (folder / "common.lua").read_text(encoding="utf-8") + text
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
