-- More of a transcript whose head was read before: entries never change, but they may go.
local revision, messages, budget = arg(), arg(), number()
local head = call('HMGET', HEAD, 'incarnation', 'transcript')
local current = head[1] and (text(tonumber(head[2])) .. '.' .. head[1]) or ''
local source = messages == 'bodies' and BODY or INFO
local numbers = numbers_of(arg())
local values, bytes = {}, 0
for first = 1, #numbers, 200 do
  if bytes >= budget then break end
  local part = {}
  for i = first, math.min(first + 199, #numbers) do part[#part + 1] = text(numbers[i]) end
  for _, value in ipairs(call('HMGET', source, unpack(part))) do
    if not value and current ~= revision then return {'moved'} end
    if value and messages == 'digests' then value = string.sub(value, 1, 16) end
    values[#values + 1] = value
    bytes = bytes + (value and #value or 0)
  end
end
return {'ok', values}
