"""Markers of tests by the servers that they ask for."""

from __future__ import annotations

from collections.abc import Mapping

import pytest


def mark_by_fixture(items: list[pytest.Item], marks: Mapping[str, str]) -> None:
    """Give each test that takes a fixture of ``marks`` (fixture to marker) that marker."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in marks:
                item.add_marker(marks[fixture])
