-- Runs of a thread by id, as stored; with their drafts if wanted.
local drafts = arg() == '1'
local found = {}
local format = call('HGET', HEAD, 'format')
if too_new(format) then return {'format', format} end
for _ = 1, number() do
  local run_id = arg()
  local raw = call('HGET', OPEN, run_id) or call('HGET', ENDED, run_id)
  found[#found + 1] = raw
  found[#found + 1] = drafts and call('HGET', DRAFTS, run_id) or false
end
return {'ok', now, found}
