-- The clock, and whether this server is part of a cluster.
local clock = redis.call('TIME')
local info = redis.call('INFO', 'cluster')
return {string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000)),
  string.find(info, 'cluster_enabled:1', 1, true) and 1 or 0}
