-- What points at the thread was kept for longer.
local at = arg()
if call('EXISTS', HEAD) == 1 then
  if at == '0' then call('HDEL', HEAD, 'renewed') else call('HSET', HEAD, 'renewed', at) end
end
return {'ok'}
