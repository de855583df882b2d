"""Alembic migrations of the chatkeep tables, under a branch label and a version table of their
own, so that they live beside an application's migrations and never meet them."""

from __future__ import annotations

__all__ = ["BRANCH", "REVISIONS"]

BRANCH = "chatkeep"
"""Branch label: ``chatkeep@head``."""

REVISIONS = ("0001", "0002")
"""All revisions, oldest first; the last is the one that this package reads and writes."""
