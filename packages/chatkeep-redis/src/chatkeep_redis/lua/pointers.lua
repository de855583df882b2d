-- What must outlive the thread in other slots: for each run its id, and its parent's if it has one.
local head = call('HMGET', HEAD, 'format')
if not head[1] then return {'none'} end
local found = {}
for _, key in ipairs({OPEN, ENDED}) do
  local all = call('HGETALL', key)
  for i = 1, #all, 2 do
    found[#found + 1] = all[i]
    found[#found + 1] = parse(all[i + 1], 'run').v.parentRunId or false
  end
end
return {'ok', found, now}
