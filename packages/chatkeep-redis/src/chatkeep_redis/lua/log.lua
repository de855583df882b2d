-- A run's delivery log: its head, and a stream whose entries are named by their numbers.
local HEAD, EVENTS = KEYS[1], KEYS[2]
local what, known_format = ARGV[1], tonumber(ARGV[2])
local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function text(n) return string.format('%.0f', n) end

local NAMES = {'format', 'runId', 'threadId', 'tenant', 'user', 'incarnation', 'epoch', 'first',
  'next', 'leaseUntil', 'closedAt', 'token'}
local TOKEN = 12

local function read()
  local found = call('HMGET', HEAD, unpack(NAMES))
  for i = 1, #NAMES do found[i] = found[i] or '' end
  return found
end

local head = read()
local exists = head[1] ~= ''
local held, closed = head[TOKEN], head[11] ~= ''

if exists and tonumber(head[1]) > known_format then return {'format', head[1]} end

local function keep(ttl)
  if ttl > 0 then
    call('PEXPIRE', HEAD, text(ttl))
    call('PEXPIRE', EVENTS, text(ttl))
  end
end

if what == 'open' then
  if not exists then
    local lease, ttl = tonumber(ARGV[9]), tonumber(ARGV[10])
    call('HSET', HEAD, 'format', text(known_format), 'runId', ARGV[3], 'threadId', ARGV[4],
      'tenant', ARGV[5], 'user', ARGV[6], 'token', ARGV[7], 'incarnation', ARGV[8],
      'epoch', '1', 'first', '1', 'next', '1', 'leaseUntil', text(now + lease))
    keep(ttl)
    head = read()
  end
  return {'ok', text(now), head}
end

if not exists then return {'unknown'} end

if what == 'append' then
  local token, number, keep_from = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
  local lease, ttl, channel, name = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8], ARGV[9]
  local count = #ARGV - 9
  local first, next_number = tonumber(head[8]), tonumber(head[9])
  if held ~= token then return {'taken', head[3]} end
  if closed then return {'closed'} end
  if number ~= next_number and number + count ~= next_number then return {'gap'} end
  if number == next_number then
    for i = 1, count do
      call('XADD', EVENTS, text(number + i - 1) .. '-0', 'b', ARGV[9 + i])
    end
  end
  local kept = math.max(first, math.min(keep_from, number + count))
  if kept > first then call('XTRIM', EVENTS, 'MINID', text(kept) .. '-0') end
  call('HSET', HEAD, 'next', text(number + count), 'first', text(kept),
    'leaseUntil', text(now + lease))
  keep(ttl)
  if count > 0 then call('PUBLISH', channel, name) end
  return {'ok'}
end

if what == 'close' then
  if held ~= ARGV[3] then return {'taken'} end
  if not closed then call('HSET', HEAD, 'closedAt', text(now)) end
  call('PUBLISH', ARGV[4], ARGV[5])
  return {'ok', text(now)}
end

if what == 'take' then
  local token, lease, only_lost = ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
  if closed then return {'closed'} end
  if held ~= token then
    if only_lost and tonumber(head[10]) > now then return {'held'} end
    call('HSET', HEAD, 'token', token, 'epoch', text(tonumber(head[7]) + 1))
  end
  call('HSET', HEAD, 'leaseUntil', text(now + lease))
  call('PUBLISH', ARGV[6], ARGV[7])
  return {'ok', text(now), read()}
end

if what == 'read' then
  local number, limit, max_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
  local bodies, size = {}, 0
  if number >= tonumber(head[8]) and number < tonumber(head[9]) then
    local found = call('XRANGE', EVENTS, text(number) .. '-0', '+', 'COUNT', text(limit))
    for i = 1, #found do
      if found[i][1] ~= text(number + i - 1) .. '-0' then break end
      local body = found[i][2][2]
      size = size + #body
      if i > 1 and size > max_bytes then break end
      bodies[i] = body
    end
  end
  return {'ok', text(now), head, bodies}
end

call('DEL', HEAD, EVENTS)
return {'ok'}
