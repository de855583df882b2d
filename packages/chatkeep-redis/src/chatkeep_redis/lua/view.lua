-- One consistent read of a thread: as much as was asked for, bodies up to a budget of bytes.
local run_id, messages, limit, before = arg(), arg(), arg(), arg()
local runs, interrupts, activities, drafts = arg(), arg(), arg() == '1', arg() == '1'
local budget = number()
local OWNER = KEYS[THREAD_KEYS + 1]
local owner = OWNER and call('HGET', OWNER, 'thread') or false

local head = call('HMGET', HEAD, 'format', 'incarnation', 'transcript', 'live')
if not head[1] then
  check_absent()
  return {'none', now, owner}
end
if too_new(head[1]) then return {'format', head[1]} end
local transcript = tonumber(head[3])
local revision = transcript > 0 and (text(transcript) .. '.' .. head[2]) or ''
local newest = newest_of(head[4])

-- The window, from its end.
local window, older, values = {}, 0, {}
if messages ~= 'none' then
  local left = limit ~= '' and tonumber(limit) or math.huge
  local bound = before ~= '' and tonumber(before) - 1 or math.huge
  local all = ranges_of(head[4])
  for i = #all, 1, -1 do
    local first, last = all[i][1], math.min(all[i][2], bound)
    if first <= last then
      if left == 0 then
        older = 1
        break
      end
      local begin = math.max(first, last - left + 1)
      if begin > first then older = 1 end
      table.insert(window, 1, {begin, last})
      left = left - (last - begin + 1)
      if older == 1 then break end
    end
  end
  if messages ~= 'numbers' then
    values = read_entries(numbers_of(line_of(window)), messages, budget)
  end
end

local own = run_id ~= '' and (call('HGET', OPEN, run_id) or call('HGET', ENDED, run_id)) or false

local found_runs = {}
if runs ~= 'none' then found_runs = call('HGETALL', OPEN) end
if runs == 'all' then
  local rest = call('HGETALL', ENDED)
  for i = 1, #rest do found_runs[#found_runs + 1] = rest[i] end
end

local found_interrupts = {}
local function add_interrupts(key)
  local all = call('HGETALL', key)
  for i = 1, #all, 2 do
    local lives = 0
    local claim = string.find(all[i + 1], '9:%d+:claimedBy') and
      parse(all[i + 1], 'interrupt').v.claimedBy
    if claim and run_lives(claim) then lives = 1 end
    local at = #found_interrupts
    found_interrupts[at + 1], found_interrupts[at + 2], found_interrupts[at + 3] =
      all[i], all[i + 1], lives
  end
end
if interrupts ~= 'none' then add_interrupts(ASKED) end
if interrupts == 'all' then add_interrupts(SETTLED) end

local found_drafts = {}
if drafts then
  local all = call('HGETALL', DRAFTS)
  for i = 1, #all, 2 do
    if call('HEXISTS', OPEN, all[i]) == 1 then
      local at = #found_drafts
      found_drafts[at + 1], found_drafts[at + 2] = all[i], all[i + 1]
    end
  end
end

return {'ok', now, owner, revision, newest, line_of(window), older, values, own, found_runs,
  found_interrupts, activities and call('HGETALL', ROWS) or {}, found_drafts}
