-- Delete a thread. What points at it from other slots is noted in GONE until that is gone too,
-- so that a delete that broke off is finished by the next one.
local ttl, tag, apart = number(), arg(), arg() == '1'
local format = call('HGET', HEAD, 'format')
if too_new(format) then return {'format', format} end
local notes = call('EXISTS', VALUES)
local found = 0
if format then
  found = 1
  for _, key in ipairs({OPEN, ENDED}) do
    local all = call('HGETALL', key)
    for i = 1, #all, 2 do
      local run = parse(all[i + 1], 'run')
      local item = pack('runId', all[i]) .. pack('mark', run.v.mark)
      if run.v.parentRunId then item = item .. pack('parentRunId', run.v.parentRunId) end
      call('RPUSH', GONE, item)
    end
  end
  local cuts = call('HGETALL', CUTS)
  for i = 1, #cuts, 2 do call('RPUSH', GONE, pack('cut', parse(cuts[i + 1], 'cut').v.mark)) end
  call('RPUSH', GONE, pack('deletedAt', text(now)))
end
for i = 1, KEPT_KEYS do call('DEL', KEYS[i]) end
if ttl > 0 and call('PTTL', GONE) == -1 then call('PEXPIRE', GONE, text(3 * ttl)) end
if not apart then
  for i = THREAD_KEYS + 1, #KEYS do call('ZREM', KEYS[i], tag) end
end
return {'ok', found, notes, call('LRANGE', GONE, 0, -1)}
