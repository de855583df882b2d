"""chatkeep on Redis, Valkey and Redis Cluster."""

from __future__ import annotations

from chatkeep_redis._factories import open_url, redis_persistence
from chatkeep_redis.backend import RedisBackend

__all__ = ["RedisBackend", "open_url", "redis_persistence"]
