-- Extend a run's lease. LOST is given where it can be written in the same step.
local ttl, run_id, token, lease, member = number(), arg(), arg(), number(), arg()
local LOST = KEYS[THREAD_KEYS + 1]
local head = call('HMGET', HEAD, 'format', 'renewed')
if too_new(head[1]) then return {'format', head[1]} end
local run = load_run(run_id)
if not run then return {'run', 'unknown'} end
if ended(run) then return {'run', 'terminal'} end
if run.v.leaseToken ~= token then return {'run', 'lease-lost'} end
run:set('leaseUntil', text(now + lease))
call('HSET', OPEN, run_id, run:raw())
if LOST and run.v.status == '"running"' then
  call('ZADD', LOST, run.v.leaseUntil, member)
  keep_apart(ttl, LOST)
end
return {'ok', run:raw(), keep(ttl, true, head[2])}
