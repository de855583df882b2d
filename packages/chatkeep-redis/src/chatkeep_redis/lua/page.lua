-- More of a transcript whose head was read before: entries never change, but they may go.
local revision, messages, budget = arg(), arg(), number()
local head = call('HMGET', HEAD, 'incarnation', 'transcript')
local current = head[1] and (text(tonumber(head[2])) .. '.' .. head[1]) or ''
local values = read_entries(numbers_of(arg()), messages, budget)
if current ~= revision then
  for _, value in ipairs(values) do
    if not value then return {'moved'} end
  end
end
return {'ok', values}
