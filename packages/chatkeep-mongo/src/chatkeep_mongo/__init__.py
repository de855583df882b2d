"""chatkeep on MongoDB: standalone, replica set or sharded."""
