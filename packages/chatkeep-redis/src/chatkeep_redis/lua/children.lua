-- A parent run's look-up: its children, by place and by the attempt that created them.
local what, member, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local call = redis.call
if what == 'get' then return call('SMEMBERS', KEYS[1]) end
if what == 'remove' then return {call('SREM', KEYS[1], member)} end
if what == 'add' then call('SADD', KEYS[1], member) end
if ttl > 0 then
  if call('PTTL', KEYS[1]) < 3 * ttl then
    call('PEXPIRE', KEYS[1], string.format('%.0f', 3 * ttl))
  end
else
  call('PERSIST', KEYS[1])
end
return {}
