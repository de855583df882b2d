-- Erase every copy of some messages: live ones, archived ones, and (as given) in drafts.
local ttl, tag = number(), arg()
local CUT_THREADS = KEYS[THREAD_KEYS + 1]
local asked = {}
for _ = 1, number() do asked[arg()] = true end
local drafts = {}
for _ = 1, number() do drafts[#drafts + 1] = {arg(), arg(), arg()} end

local head = call('HMGET', HEAD, 'format', 'incarnation', 'version', 'transcript', 'live', 'count',
  'renewed')
if not head[1] then return {'ok', 0, {}, 0} end
if too_new(head[1]) then return {'format', head[1]} end
for _, draft in ipairs(drafts) do
  if call('HGET', DRAFTS, draft[1]) ~= draft[2] then return {'moved'} end
end

local gone, list = {}, {}
local infos = call('HGETALL', INFO)
for i = 1, #infos, 2 do
  if asked[string.sub(infos[i + 1], 17)] then
    local n = tonumber(infos[i])
    gone[n] = true
    list[#list + 1] = n
  end
end

local alive, live_gone = {}, 0
for _, n in ipairs(numbers_of(head[5])) do
  if gone[n] then live_gone = live_gone + 1 else push(alive, n, n) end
end
local edits = {}
local all = call('HGETALL', CUTS)
for i = 1, #all, 2 do
  local cut = parse(all[i + 1], 'cut')
  local numbers, rest = numbers_of(cut.v.numbers), {}
  local extra = tonumber(cut.v.extra)
  local first_extra, left = #numbers - extra + 1, extra
  for at, n in ipairs(numbers) do
    if not gone[n] then
      rest[#rest + 1] = n
    elseif at >= first_extra then
      left = left - 1
    end
  end
  if #rest < #numbers then
    cut:set('numbers', line_of(ranges_from(rest)))
    cut:set('extra', text(left))
    edits[#edits + 1] = {all[i], cut, #rest}
  end
end

local marks = {}
for _, edit in ipairs(edits) do
  if edit[3] == 0 then
    call('HDEL', CUTS, edit[1])
    marks[#marks + 1] = edit[2].v.mark
    if CUT_THREADS then call('ZREM', CUT_THREADS, tag .. '/' .. edit[2].v.mark) end
  else
    call('HSET', CUTS, edit[1], edit[2]:raw())
  end
end
erase(list)
for _, draft in ipairs(drafts) do call('HSET', DRAFTS, draft[1], draft[3]) end
if live_gone > 0 then
  local version = text(tonumber(head[3]) + 1)
  call('HSET', HEAD, 'version', version, 'transcript', version, 'live', line_of(alive), 'count',
    text(tonumber(head[6]) - live_gone))
end
local written = #list > 0 or #drafts > 0
return {'ok', #list, marks, written and keep(ttl, true, head[7]) or 0}
