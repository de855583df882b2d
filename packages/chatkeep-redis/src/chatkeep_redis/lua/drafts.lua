-- All drafts of a thread, as stored.
local format = call('HGET', HEAD, 'format')
if too_new(format) then return {'format', format} end
return {'ok', call('HGETALL', DRAFTS)}
