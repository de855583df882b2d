-- The cuts of a thread, each with the ids of its messages; or the bodies of one.
local wanted, with_ids = arg(), arg() == "1"
local head = call('HMGET', HEAD, 'format', 'incarnation')
if not head[1] then return {'none'} end
if too_new(head[1]) then return {'format', head[1]} end
local function of_entries(key, numbers, from, to)
  local found = {}
  each_slice(texts(numbers), function(part)
    for _, value in ipairs(call('HMGET', key, unpack(part))) do
      if not value then error('CHATKEEP-CORRUPT entry of a cut') end
      found[#found + 1] = string.sub(value, from, to)
    end
  end)
  return found
end
if wanted ~= '' then
  local field, rest = string.match(string.sub(wanted, 2), '^(%d+)%.(.*)$')
  local raw = rest == head[2] and call('HGET', CUTS, field)
  if not raw then return {'none'} end
  local numbers = numbers_of(parse(raw, 'cut').v.numbers)
  return {'ok', line_of(ranges_from(numbers)), of_entries(BODY, numbers, 1, -1)}
end
local found = {}
local all = call('HGETALL', CUTS)
for i = 1, #all, 2 do
  local numbers = numbers_of(parse(all[i + 1], 'cut').v.numbers)
  local at = #found
  found[at + 1] = all[i] .. '.' .. head[2]
  found[at + 2] = all[i + 1]
  found[at + 3] = with_ids and of_entries(INFO, numbers, 17, -1) or {}
end
return {'ok', found}
