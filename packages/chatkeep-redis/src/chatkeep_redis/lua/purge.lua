-- Erase cuts made before a time; the marks of those that went.
local ttl, tag, before = number(), arg(), number()
local CUT_THREADS = KEYS[THREAD_KEYS + 1]
local head = call('HMGET', HEAD, 'format', 'renewed')
if not head[1] then return {'ok', {}, 0} end
if too_new(head[1]) then return {'format', head[1]} end
local old = {}
local all = call('HGETALL', CUTS)
for i = 1, #all, 2 do
  local cut = parse(all[i + 1], 'cut')
  if tonumber(cut.v.cutAt) < before then old[#old + 1] = {all[i], cut} end
end
local marks = {}
for _, pair in ipairs(old) do
  erase(numbers_of(pair[2].v.numbers))
  call('HDEL', CUTS, pair[1])
  if CUT_THREADS then call('ZREM', CUT_THREADS, tag .. '/' .. pair[2].v.mark) end
  marks[#marks + 1] = pair[2].v.mark
end
return {'ok', marks, #old > 0 and keep(ttl, true, head[2]) or 0}
