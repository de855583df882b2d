"""Fixtures that every test directory of the workspace shares."""

from __future__ import annotations

pytest_plugins = ["servers.plugin"]
