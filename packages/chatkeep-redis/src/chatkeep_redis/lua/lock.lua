-- A lock: who holds it, until when, and a fence that only grows.
local LOCK = KEYS[1]
local what, known_format, token, lease = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function text(n) return string.format('%.0f', n) end

local found = call('HMGET', LOCK, 'format', 'token', 'fence', 'leaseUntil')
if found[1] and tonumber(found[1]) > known_format then return {'format', found[1]} end
local holder = found[2] or ''

if what == 'acquire' then
  local fence = tonumber(found[3] or '0')
  if holder ~= token then
    if found[4] and tonumber(found[4]) > now then return {'held'} end
    fence = math.max(fence + 1, now)
  end
  call('HSET', LOCK, 'format', text(known_format), 'token', token, 'fence', text(fence),
    'leaseUntil', text(now + lease))
  return {'ok', text(fence)}
end
if holder ~= token then return {'taken'} end
if what == 'renew' then
  call('HSET', LOCK, 'leaseUntil', text(now + lease))
elseif tonumber(found[3]) < now then
  -- The clock alone gives the next holder a higher fence.
  call('DEL', LOCK)
else
  call('HSET', LOCK, 'token', '', 'leaseUntil', '0')
end
return {'ok'}
