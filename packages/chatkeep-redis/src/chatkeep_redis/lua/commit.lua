-- One boundary: judge everything, then write. There is no way back after the first write.
local mark, born, ttl, tag = arg(), arg(), number(), arg()
local apart = arg() == '1'
-- Of look-ups and indexes in other slots: those that were written before, and when.
local thread_hint, hints, hinted_at, hint_ms = number(), arg(), number(), number()
local takeover = arg()
local THREADS, IDLE, LOST, DETACHED, ALL_DETACHED, CUT_THREADS, OWNER, PARENT
if not apart then
  THREADS, IDLE, LOST, DETACHED, ALL_DETACHED, CUT_THREADS, OWNER, PARENT =
    KEYS[THREAD_KEYS + 1], KEYS[THREAD_KEYS + 2], KEYS[THREAD_KEYS + 3], KEYS[THREAD_KEYS + 4],
    KEYS[THREAD_KEYS + 5], KEYS[THREAD_KEYS + 6], KEYS[THREAD_KEYS + 7], KEYS[THREAD_KEYS + 8]
end

local run_id, token, expired = arg(), arg(), arg() == '1'
local thread_id, is_child = arg(), arg() == '1'
-- Who is named on a cut, and the run's place in indexes; empty without a run.
local cut_by, member = arg(), arg()

local head = call('HMGET', HEAD, 'format', 'incarnation', 'version', 'transcript', 'next', 'live',
  'count', 'rows', 'commits', 'order', 'renewed')
local exists = head[1] ~= false
if not exists then check_absent() end
if too_new(head[1]) then return {'format', head[1]} end
local incarnation = exists and head[2] or born
local version = tonumber(head[3] or '0') + 1
local transcript = tonumber(head[4] or '0')
local next_number = tonumber(head[5] or '1')
local alive = head[6] or ''
local count = tonumber(head[7] or '0')
local rows = tonumber(head[8] or '0')
local commits = head[9] or ''
local order = math.max(tonumber(head[10] or '0') + 1, micros)

local function named(number_of)
  return number_of > 0 and (text(number_of) .. '.' .. incarnation) or ''
end

-- ------------------------------------------------------------------------------- the run

local op = arg()
local start, patch
if op == 'start' then
  start = {token = arg(), lease = arg(), hide = arg(), parent = arg(), raw = arg()}
elseif op == 'patch' then
  patch = {status = arg(), set = {}, drop = {}}
  for _ = 1, number() do
    local name = arg()
    patch.set[#patch.set + 1] = {name, arg()}
    patch.set[name] = true
  end
  for _ = 1, number() do
    local name = arg()
    patch.drop[#patch.drop + 1] = name
    patch.drop[name] = true
  end
end

do
  local at = string.find('\n' .. commits, '\n' .. mark .. ' ', 1, true)
  if at then
    local stop = string.find(commits, '\n', at, true)
    local run = op ~= '' and load_run(run_id)
    return {'known', now, incarnation, string.sub(commits, at, (stop or #commits + 1) - 1),
      run and run:raw() or false}
  end
end

local stored = load_run(run_id)
local was_lost_candidate = stored and stored.v.status == '"running"' and stored.v.leaseUntil
local was_detached = stored and stored.v.status == '"running"' and stored.v.detachedSince
local was_ended = stored and ended(stored)
local run, created_run

if token ~= '' and not start then
  if not stored or stored.v.leaseToken ~= token then return {'run', 'lease-lost'} end
  if expired and tonumber(stored.v.leaseUntil) > now then return {'run', 'running'} end
end

-- What follows may not change `stored` where answers ask whether it lives: that is judged by
-- the runs as they were.
if start then
  if stored then
    if was_ended then return {'run', 'terminal'} end
    if stored.v.status == '"running"' and live(stored) then return {'run', 'running'} end
    run = stored:copy()
  else
    if not apart then
      local owner = call('HGET', OWNER, 'thread')
      if owner and owner ~= thread_id then
        -- Taken over only as it was when its thread was found to have no such run.
        local claims = table.concat(call('HKEYS', OWNER), ' ')
        if claims ~= takeover then return {'foreign', owner, claims} end
      end
    end
    run, created_run = parse(start.raw, 'new run'), true
    run:set('order', text(order))
    run:set('mark', mark)
    order = order + 1
  end
  if start.token ~= '' then
    run:set('leaseToken', start.token)
    run:set('leaseUntil', text(now + tonumber(start.lease)))
  else
    run:drop('leaseToken')
    run:drop('leaseUntil')
  end
  if stored and start.hide ~= '' then run:set('hideFrom', start.hide) end
elseif patch then
  if not stored then return {'run', 'unknown'} end
  local was, will = stored.v.status, patch.status
  local holds = token ~= '' and stored.v.leaseToken == token
  run = stored:copy()
  if will ~= '' then
    local allowed = was == will or not was_ended
      or (holds and was == '"failed"' and stored.v.errorCode == 'worker_lost')
    if was == '"interrupted"' and will == '"running"' then allowed = false end
    if not allowed then
      local detail = string.gsub(was .. ' to ' .. will, '"', '')
      return {'run', 'transition', detail}
    end
    if was == '"failed"' and will ~= was and not patch.set.error then
      run:drop('error')
      run:drop('errorCode')
    end
    if was_ended and not TERMINAL[will] and not patch.set.finishedAt then run:drop('finishedAt') end
  end
  for _, pair in ipairs(patch.set) do run:set(pair[1], pair[2]) end
  for _, name in ipairs(patch.drop) do run:drop(name) end
end

-- ------------------------------------------------------------------------------ interrupts

local changed, changes = {}, {}
local pending

local function look_up_pending()
  if pending then return end
  pending = {}
  local found = call('HGETALL', ASKED)
  for i = 1, #found, 2 do
    local own_run, id = string.match(found[i], '^(%Z+)%z(%Z+)$')
    pending[#pending + 1] = {key = found[i], run = own_run, id = id, raw = found[i + 1]}
  end
end

local function later(one, other)
  local a, b = tonumber(one.v.requestedAt), tonumber(other.v.requestedAt)
  if a ~= b then return a > b end
  return tonumber(one.v.order) > tonumber(other.v.order)
end

-- The pending one of that name, the newest of several; else why there is none.
local function find(id, own_run)
  look_up_pending()
  local best
  for _, entry in ipairs(pending) do
    if entry.id == id and (own_run == '' or entry.run == own_run) then
      entry.record = entry.record or parse(entry.raw, 'interrupt')
      local open = entry.record.v.status == '"pending"'
      if open and (not best or later(entry.record, best.record)) then best = entry end
    end
  end
  if best then return best end
  local newest
  local function consider(key, record)
    local its_run, its_id = string.match(key, '^(%Z+)%z(%Z+)$')
    if its_id == id and (own_run == '' or its_run == own_run) then
      if not newest or later(record, newest) then newest = record end
    end
  end
  local settled = call('HGETALL', SETTLED)
  for i = 1, #settled, 2 do consider(settled[i], parse(settled[i + 1], 'interrupt')) end
  for key, record in pairs(changed) do consider(key, record) end
  if not newest then return nil, 'does not exist' end
  return nil, 'is already ' .. string.gsub(newest.v.status, '"', '')
end

local function claimed_elsewhere(record, by)
  local claim = record.v.claimedBy
  return claim and claim ~= by and run_lives(claim)
end

local function change(entry)
  if not changed[entry.key] then changes[#changes + 1] = entry.key end
  changed[entry.key] = entry.record
end

for _ = 1, number() do
  local id, own_run, status, response = arg(), arg(), arg(), arg()
  local entry, why = find(id, own_run)
  if not entry then return {'interrupt', id, why} end
  if claimed_elsewhere(entry.record, run_id) then
    return {'interrupt', id, 'is claimed by another run'}
  end
  entry.record:set('status', status)
  entry.record:set('resolvedAt', text(now))
  entry.record:drop('claimedBy')
  if response ~= '' then entry.record:set('response', response) end
  change(entry)
end

local claims = number()
if claims > 0 and not start and not stored then return {'run', 'unknown'} end
for _ = 1, claims do
  local id, own_run = arg(), arg()
  local entry, why = find(id, own_run)
  if not entry then return {'interrupt', id, why} end
  if claimed_elsewhere(entry.record, nil) then
    return {'interrupt', id, 'is claimed by another run'}
  end
  entry.record:set('claimedBy', run_id)
  change(entry)
end

for _ = 1, number() do
  local key, id, raw = arg(), arg(), arg()
  if call('HEXISTS', ASKED, key) == 1 or call('HEXISTS', SETTLED, key) == 1 then
    return {'interrupt', id, 'already exists'}
  end
  local record = parse(raw, 'new interrupt')
  record:set('order', text(order))
  order = order + 1
  change({key = key, record = record})
end

-- ------------------------------------------------------------------------------ activities

local length = arg()
local puts = {}
if length ~= '' then
  local needed = number()
  if needed > rows then return {'rows', needed - 1} end
  for _ = 1, number() do
    puts[#puts + 1] = arg()
    puts[#puts + 1] = arg()
  end
end
local drop_draft = arg() == '1'

-- ------------------------------------------------------------------------------ transcript

local kind, keep_through, expected, archive, restored = arg(), 0, '-', true, ''
local tail, returning = {}, {}

local function entries()
  local found = {}
  for _ = 1, number() do found[#found + 1] = {arg(), arg()} end
  return found
end

if kind == 'splice' then
  keep_through, expected, archive = number(), arg(), arg() == '1'
  tail = entries()
  for _, entry in ipairs(tail) do returning[string.sub(entry[1], 17)] = true end
  returning[''] = nil
elseif kind == 'restore' then
  restored, expected = arg(), arg()
elseif kind == 'check' then
  expected, kind = arg(), ''
end
local appended_to = arg()
local extra = appended_to ~= '' and entries() or {}

if expected ~= '-' and string.sub(expected, 2) ~= named(transcript) then
  return {'thread', named(transcript)}
end

local function load_cut(cut_id)
  local field, rest = string.match(cut_id, '^(%d+)%.(.*)$')
  local raw = rest == incarnation and call('HGET', CUTS, field)
  if not raw then return nil end
  return {field = field, record = parse(raw, 'cut')}
end

local back, grown
if restored ~= '' then
  back = load_cut(string.sub(restored, 2))
  if not back then return {'cut', string.sub(restored, 2)} end
  keep_through = tonumber(back.record.v.after)
end
if appended_to ~= '' then
  grown = load_cut(string.sub(appended_to, 2))
  if not grown then return {'cut', string.sub(appended_to, 2)} end
end

-- What is cut: numbers to archive, numbers to erase.
local kept, gone, after, cut_count = {}, {}, newest_of(alive), 0
local ranges
if kind ~= '' and after > keep_through then
  local cut = {}
  ranges = {}
  for _, range in ipairs(ranges_of(alive)) do
    if range[1] <= keep_through then
      ranges[#ranges + 1] = {range[1], math.min(range[2], keep_through)}
    end
    for n = math.max(range[1], keep_through + 1), range[2] do cut[#cut + 1] = n end
  end
  after = ranges[#ranges] and ranges[#ranges][2] or 0
  cut_count = #cut
  if not archive then
    gone = cut
  elseif next(returning) == nil then
    kept = cut
  else
    for first = 1, #cut, SLICE do
      local part = {}
      for i = first, math.min(first + SLICE - 1, #cut) do part[#part + 1] = text(cut[i]) end
      for i, info in ipairs(call('HMGET', INFO, unpack(part))) do
        if not info then error('CHATKEEP-CORRUPT entry ' .. part[i]) end
        local list = returning[string.sub(info, 17)] and gone or kept
        list[#list + 1] = cut[first + i - 1]
      end
    end
  end
end

-- -------------------------------------------------------------- hints in other slots, first

local is_candidate = run and run.v.status == '"running"' and run.v.leaseUntil
local is_detached = run and run.v.status == '"running"' and run.v.detachedSince
if apart then
  local fresh = now <= hinted_at + hint_ms
  local needs = ''
  local function need(letter, wanted)
    if wanted and not (fresh and string.find(hints, letter, 1, true)) then
      needs = needs .. letter
    end
  end
  if now > thread_hint + hint_ms then needs = 't' end
  need('r', created_run)
  need('l', is_candidate and (not was_lost_candidate
    or tonumber(is_candidate) < tonumber(was_lost_candidate)))
  need('d', is_detached and is_detached ~= was_detached)
  need('c', #kept > 0)
  if needs ~= '' then return {'need', now, needs, is_detached or ''} end
end

-- ---------------------------------------------------------------- nothing is refused any more

local live_numbers = ''
if cut_count > 0 then
  erase(gone)
  alive = line_of(ranges)
  count = count - cut_count
  if #kept > 0 then
    local record = pack('after', text(after)) .. pack('cutAt', text(now))
    if cut_by ~= '' then record = record .. pack('runId', cut_by) end
    record = record .. pack('numbers', line_of(ranges_from(kept))) .. pack('extra', '0')
      .. pack('mark', mark)
    call('HSET', CUTS, text(version), record)
    if not apart then call('ZADD', CUT_THREADS, text(now), tag .. '/' .. mark) end
  end
end

local function write(list, first)
  for at = 1, #list, SLICE / 2 do
    local bodies, infos = {}, {}
    for i = at, math.min(at + SLICE / 2 - 1, #list) do
      local field = text(first + i - 1)
      bodies[#bodies + 1], infos[#infos + 1] = field, field
      bodies[#bodies + 1], infos[#infos + 1] = list[i][2], list[i][1]
    end
    call('HSET', BODY, unpack(bodies))
    call('HSET', INFO, unpack(infos))
  end
end

local function append_live(first, last)
  local before = newest_of(alive)
  if before > 0 and before == first - 1 then
    alive = string.gsub(alive, '%d+$', text(last))
  else
    alive = alive .. (before > 0 and ',' or '') .. text(first) .. '-' .. text(last)
  end
end

if #tail > 0 then
  local last = next_number + #tail - 1
  write(tail, next_number)
  append_live(next_number, last)
  live_numbers = text(next_number) .. '-' .. text(last)
  next_number = last + 1
  count = count + #tail
end
if back then
  live_numbers = back.record.v.numbers
  for _, range in ipairs(ranges_of(live_numbers)) do
    append_live(range[1], range[2])
    count = count + range[2] - range[1] + 1
  end
  call('HDEL', CUTS, back.field)
  if not apart then call('ZREM', CUT_THREADS, tag .. '/' .. back.record.v.mark) end
end
if cut_count > 0 or live_numbers ~= '' then transcript = version end
if grown and #extra > 0 then
  write(extra, next_number)
  local numbers = ranges_of(grown.record.v.numbers)
  push(numbers, next_number, next_number + #extra - 1)
  next_number = next_number + #extra
  grown.record:set('numbers', line_of(numbers))
  grown.record:set('extra', text(tonumber(grown.record.v.extra) + #extra))
  call('HSET', CUTS, grown.field, grown.record:raw())
end

local run_raw = run and run:raw() or false
if run then
  local raw = run_raw
  if ended(run) then
    if stored and not was_ended then call('HDEL', OPEN, run_id) end
    call('HSET', ENDED, run_id, raw)
  else
    if was_ended then call('HDEL', ENDED, run_id) end
    call('HSET', OPEN, run_id, raw)
  end
  if not apart then
    if is_candidate then
      call('ZADD', LOST, run.v.leaseUntil, member)
    elseif was_lost_candidate then
      call('ZREM', LOST, member)
    end
    for _, index in ipairs({DETACHED, ALL_DETACHED}) do
      if is_detached then
        call('ZADD', index, is_detached, member)
      elseif was_detached then
        call('ZREM', index, member)
      end
    end
    if created_run then
      if takeover ~= '' then call('DEL', OWNER) end
      call('HSET', OWNER, 'thread', thread_id, 'n:' .. mark, text(now))
      local written = {OWNER}
      if start.parent == '1' then
        call('SADD', PARENT, member .. '/' .. mark)
        written[2] = PARENT
      end
      for _, key in ipairs(written) do keep_apart(ttl, key) end
    end
  end
end

for _, key in ipairs(changes) do
  local record = changed[key]
  if record.v.status == '"pending"' then
    call('HSET', ASKED, key, record:raw())
  else
    call('HDEL', ASKED, key)
    call('HSET', SETTLED, key, record:raw())
  end
end

if length ~= '' then
  each_slice(puts, function(part) call('HSET', ROWS, unpack(part)) end)
  local surplus = {}
  for i = tonumber(length), rows - 1 do surplus[#surplus + 1] = text(i) end
  each_slice(surplus, function(part) call('HDEL', ROWS, unpack(part)) end)
  rows = tonumber(length)
end
if drop_draft and run_id ~= '' then call('HDEL', DRAFTS, run_id) end

local newest = newest_of(alive)
local flags = (created_run and 1 or 0) + (#kept > 0 and 2 or 0)
local line = mark .. ' ' .. text(version) .. ' ' .. (live_numbers ~= '' and live_numbers or '-')
  .. ' ' .. flags .. ' ' .. text(transcript) .. ' ' .. text(newest)
-- Of those before, the fifteen youngest.
local stop = 0
for _ = 1, 15 do
  stop = string.find(commits, '\n', stop + 1, true)
  if not stop then break end
end
if stop then commits = string.sub(commits, 1, stop - 1) end
local lines = commits == '' and line or (line .. '\n' .. commits)

call('HSET', HEAD, 'version', text(version), 'transcript', text(transcript), 'next',
  text(next_number), 'live', alive, 'count', text(count), 'rows', text(rows), 'commits', lines,
  'order', text(order), 'updated', text(now))
local renewed = head[11]
if not exists then
  call('HSET', HEAD, 'format', FORMAT, 'incarnation', incarnation, 'created', text(now), 'born',
    text(micros))
  if ttl > 0 then
    renewed = text(now)
    call('HSET', HEAD, 'renewed', renewed)
  end
end
local due = keep(ttl, exists, renewed)
if not apart then
  local indexes = is_child and {THREADS} or {THREADS, IDLE}
  for _, index in ipairs(indexes) do
    call('ZADD', index, text(now), tag)
    if ttl > 0 then call('ZREMRANGEBYSCORE', index, '-inf', text(now - 3 * ttl)) end
  end
  for i = THREAD_KEYS + 1, THREAD_KEYS + 6 do keep_apart(ttl, KEYS[i]) end
end

return {'ok', now, named(transcript), newest, live_numbers, created_run and 1 or 0,
  #kept > 0 and named(version) or '', run_raw, due}
