"""Streamed text: deltas joined on demand."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["Text", "whole_text"]

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def whole_text(text: str) -> str:
    """``text`` with lone surrogates replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


class Text:
    """Deltas joined on demand. A surrogate pair split over two deltas is put together again;
    a lone surrogate becomes U+FFFD."""

    __slots__ = ("_held", "parts")

    def __init__(self, parts: list[str] | None = None) -> None:
        self.parts: list[str] = [] if parts is None else parts
        self._held = ""

    def add(self, delta: str) -> str:
        """Append; returns what to publish."""
        if self._held or (not delta.isascii() and _SURROGATE.search(delta)):
            delta = self._held + delta
            self._held = delta[-1:] if "\ud800" <= delta[-1:] <= "\udbff" else ""
            whole = delta[: len(delta) - len(self._held)]
            delta = whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if delta:
            self.parts.append(delta)
        return delta

    def rest(self) -> str:
        """What is still held back at the end."""
        held, self._held = self._held, ""
        if not held:
            return ""
        self.parts.append("\ufffd")
        return "\ufffd"

    def replace(self, text: str) -> None:
        """Forget what was gathered and have ``text`` instead."""
        self._held = ""
        self.parts[:] = [whole_text(text)]

    def __str__(self) -> str:
        if len(self.parts) > 1:
            self.parts[:] = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""
