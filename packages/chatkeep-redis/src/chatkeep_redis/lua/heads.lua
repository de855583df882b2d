-- The heads of many threads: one key each. All of one slot on a cluster.
local found = {}
for i, key in ipairs(KEYS) do
  found[i] = redis.call('HMGET', key, 'format', 'created', 'updated', 'born', 'count')
end
return found
