-- A run's look-up: which thread of the scope owns the id. A claim is one attempt to create the
-- run; the claim of the attempt that did so stays.
local what, thread, mark = ARGV[1], ARGV[2], ARGV[3]
local ttl, hint_ms, takeover = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local OWNER = KEYS[1]
local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local owner = call('HGET', OWNER, 'thread')

local function youngest()
  local last = 0
  local all = call('HGETALL', OWNER)
  for i = 1, #all, 2 do
    if all[i] ~= 'thread' then last = math.max(last, tonumber(all[i + 1])) end
  end
  return last
end

if what == 'get' then return {owner} end
if what == 'claim' then
  if owner and owner ~= thread then
    -- Nobody may still be about to create the run that the caller did not find.
    if owner ~= takeover or now <= youngest() + 2 * hint_ms then return {owner} end
    call('DEL', OWNER)
  end
  call('HSET', OWNER, 'thread', thread, 'n:' .. mark, string.format('%.0f', now))
elseif what == 'release' then
  if owner ~= thread then return {owner} end
  call('HDEL', OWNER, 'n:' .. mark)
  if ARGV[6] == 'old' then
    local all = call('HGETALL', OWNER)
    for i = 1, #all, 2 do
      if all[i] ~= 'thread' and tonumber(all[i + 1]) + 2 * hint_ms < now then
        call('HDEL', OWNER, all[i])
      end
    end
  end
  if call('HLEN', OWNER) == 1 then call('DEL', OWNER) end
  return {false}
end
if what == 'keep' and not owner then return {false} end
if ttl > 0 then
  if call('PTTL', OWNER) < 3 * ttl then call('PEXPIRE', OWNER, string.format('%.0f', 3 * ttl)) end
else
  call('PERSIST', OWNER)
end
return {thread}
