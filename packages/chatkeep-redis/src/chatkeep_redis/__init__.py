"""chatkeep on Redis, Valkey and Redis Cluster."""
