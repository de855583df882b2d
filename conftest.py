"""What every test shares: servers to start, and repeatable random examples.

Random examples are the same in each run, so that a red run says something about the change under
test. ``CHATKEEP_TEST_EXPLORE=1`` draws new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

pytest_plugins = [
    "servers.plugin",
    "servers.redis_plugin",
    "servers.dynamodb_plugin",
    "servers.mongo_plugin",
]

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("explore" if os.environ.get("CHATKEEP_TEST_EXPLORE") else "repeatable")
