"""Offsets: texts that name an event of a run, in a header or a query, for ever."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

__all__ = ["Offset", "offset_run"]

_PLACE = re.compile(r"(?:([0-9a-f]{8})\.)?([0-9]{1,15})", re.ASCII)


class Offset(NamedTuple):
    """Event ``number`` of a run. ``incarnation`` tells apart the logs that were kept of one run id
    one after the other; it is empty where a log ends with its process."""

    run_id: str
    number: int
    incarnation: str = ""

    def __str__(self) -> str:
        mark = f"{self.incarnation}." if self.incarnation else ""
        return f"{quote(self.run_id, safe='')}:{mark}{self.number}"

    @classmethod
    def parse(cls, text: str) -> Offset | None:
        """The offset that ``text`` is; None if it is none of ours."""
        name, colon, place = text.rpartition(":")
        found = _PLACE.fullmatch(place)
        if not colon or found is None:
            return None
        try:
            run_id = unquote(name, errors="strict")
        except UnicodeDecodeError:
            return None
        offset = cls(run_id, int(found[2]), found[1] or "")
        # Only the spelling that we hand out is an offset: one event, one name.
        return offset if str(offset) == text else None


def offset_run(offset: str) -> str | None:
    """The run id within an offset of ours; None if it is none."""
    return parsed.run_id if (parsed := Offset.parse(offset)) else None
