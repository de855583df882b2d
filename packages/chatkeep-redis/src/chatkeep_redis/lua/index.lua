-- A sorted set of places by time: a page of it, a hint, or corrections that hold only if nobody
-- has written the place since it was read.
local what = ARGV[1]
local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local INDEX = KEYS[1]
if what == 'up' then
  return {now, call('ZRANGEBYSCORE', INDEX, ARGV[5] or '-inf', ARGV[2], 'WITHSCORES', 'LIMIT',
    ARGV[3], ARGV[4])}
end
if what == 'down' then
  return {now, call('ZREVRANGEBYSCORE', INDEX, ARGV[2], '-inf', 'WITHSCORES', 'LIMIT', ARGV[3],
    ARGV[4])}
end
local function keep(ttl)
  if ttl == 0 then
    call('PERSIST', INDEX)
  elseif call('PTTL', INDEX) < 3 * ttl then
    call('PEXPIRE', INDEX, string.format('%.0f', 3 * ttl))
  end
end
if what == 'keep' then
  keep(tonumber(ARGV[2]))
  return {now}
end
if what == 'hint' then
  local member, score, ttl, raise = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
  if raise then call('ZADD', INDEX, 'GT', score, member) else call('ZADD', INDEX, score, member) end
  if ttl > 0 and raise then
    call('ZREMRANGEBYSCORE', INDEX, '-inf', string.format('%.0f', now - 3 * ttl))
  end
  keep(ttl)
  return {now}
end
if what == 'drop' then
  for i = 2, #ARGV do call('ZREM', INDEX, ARGV[i]) end
  return {now}
end
if what == 'left' then
  local score = call('ZSCORE', INDEX, ARGV[2])
  if score and tonumber(score) + tonumber(ARGV[3]) <= now then call('ZREM', INDEX, ARGV[2]) end
  return {now}
end
for i = 2, #ARGV, 3 do
  local score = call('ZSCORE', INDEX, ARGV[i])
  if score and tonumber(score) == tonumber(ARGV[i + 1]) then
    if ARGV[i + 2] == '' then
      call('ZREM', INDEX, ARGV[i])
    else
      call('ZADD', INDEX, ARGV[i + 2], ARGV[i])
    end
  end
end
return {now}
