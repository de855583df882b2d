-- Put a run's draft into its slot.
local ttl, run_id, token, body = number(), arg(), arg(), arg()
local head = call('HMGET', HEAD, 'format', 'renewed')
if too_new(head[1]) then return {'format', head[1]} end
local run = load_run(run_id)
if not run then return {'run', 'unknown'} end
if ended(run) then return {'run', 'terminal'} end
if token ~= '' and run.v.leaseToken ~= token then return {'run', 'lease-lost'} end
call('HSET', DRAFTS, run_id, FORMAT .. ' ' .. text(now) .. ' ' .. body)
return {'ok', keep(ttl, true, head[2])}
