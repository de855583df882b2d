-- Metadata under one key: get, put, delete, or all of it.
local ttl, what = number(), arg()
local function live_too()
  local head = call('HMGET', HEAD, 'format', 'renewed')
  return head[1] and keep(ttl, true, head[2]) or 0
end
if what == 'all' then return {'ok', call('HGETALL', VALUES)} end
local namespace = arg()
local stored = call('HGET', VALUES, namespace)
if what == 'get' then return {'ok', stored} end
if what == 'delete' then
  if not stored then return {'ok', 0} end
  call('HDEL', VALUES, namespace)
  return {'ok', live_too()}
end
local expected, revision, body = arg(), arg(), arg()
local current = stored and string.match(stored, '^%d+ (%S+) ') or ''
if stored and too_new(string.match(stored, '^(%d+) ')) then
  return {'format', string.match(stored, '^(%d+) ')}
end
-- A call that was sent again finds what it has written itself.
if current == revision then return {'ok', 1, 0} end
if expected ~= '*' and string.sub(expected, 2) ~= current then return {'ok', 0, 0} end
call('HSET', VALUES, namespace, FORMAT .. ' ' .. revision .. ' ' .. body)
return {'ok', 1, live_too()}
