"""chatkeep on MongoDB: standalone, replica set or sharded."""

from __future__ import annotations

from chatkeep_mongo._factories import mongo_persistence, open_url
from chatkeep_mongo.backend import MongoBackend

__all__ = ["MongoBackend", "mongo_persistence", "open_url"]
