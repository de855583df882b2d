-- What every script about one thread has in front. Its keys all carry the thread's hash tag.
local HEAD, BODY, INFO, OPEN, ENDED, ASKED, SETTLED, ROWS, DRAFTS, CUTS, VALUES, GONE =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10],
  KEYS[11], KEYS[12]
local THREAD_KEYS, KEPT_KEYS = 12, 11
local FORMAT, SLICE = 1, 1000
local call = redis.call

local clock = call('TIME')
local micros = clock[1] * 1000000 + clock[2]
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local taken = 0
local function arg()
  taken = taken + 1
  return ARGV[taken]
end
local function number() return tonumber(arg()) end

-- Lua writes numbers above 14 digits with an exponent.
local function text(value) return string.format('%.0f', value) end

-- A record is a run of "<name length>:<value length>:<name><value>".
local function pack(name, value)
  return #name .. ':' .. #value .. ':' .. name .. value
end

local Record = {}
Record.__index = Record

local REQUIRED = {
  run = {'status', 'order', 'mark'},
  interrupt = {'status', 'requestedAt', 'order'},
  cut = {'after', 'cutAt', 'numbers', 'extra', 'mark'},
}
local NUMERIC = {
  order = true, leaseUntil = true, requestedAt = true, after = true, cutAt = true, extra = true,
}

local function parse(raw, what)
  local names, values, at = {}, {}, 1
  while at <= #raw do
    local _, stop, a, b = string.find(raw, '^(%d+):(%d+):', at)
    if not stop then error('CHATKEEP-CORRUPT ' .. what) end
    a, b = tonumber(a), tonumber(b)
    local name = string.sub(raw, stop + 1, stop + a)
    names[#names + 1] = name
    values[name] = string.sub(raw, stop + a + 1, stop + a + b)
    at = stop + a + b + 1
    if at > #raw + 1 or (NUMERIC[name] and not tonumber(values[name])) then
      error('CHATKEEP-CORRUPT ' .. what)
    end
  end
  for _, name in ipairs(REQUIRED[what] or {}) do
    if not values[name] then error('CHATKEEP-CORRUPT ' .. what) end
  end
  return setmetatable({names = names, v = values}, Record)
end

function Record:set(name, value)
  if self.v[name] == nil then
    for i = 1, #self.names do
      if self.names[i] == name then table.remove(self.names, i) break end
    end
    self.names[#self.names + 1] = name
  end
  self.v[name] = value
end

function Record:drop(name) self.v[name] = nil end

function Record:copy()
  local names, values = {}, {}
  for i, name in ipairs(self.names) do
    names[i], values[name] = name, self.v[name]
  end
  return setmetatable({names = names, v = values}, Record)
end

function Record:raw()
  local parts = {}
  for _, name in ipairs(self.names) do
    local value = self.v[name]
    if value ~= nil then parts[#parts + 1] = pack(name, value) end
  end
  return table.concat(parts)
end

local TERMINAL = {['"completed"'] = true, ['"failed"'] = true, ['"aborted"'] = true}
local function ended(run) return TERMINAL[run.v.status] or false end
local function live(run)
  local till = run.v.leaseUntil
  return not ended(run) and (till == nil or tonumber(till) > now)
end

local function load_run(run_id)
  if run_id == '' then return nil end
  local raw = call('HGET', OPEN, run_id) or call('HGET', ENDED, run_id)
  return raw and parse(raw, 'run') or nil
end

local function run_lives(run_id)
  local raw = call('HGET', OPEN, run_id)
  return raw and live(parse(raw, 'run')) or false
end

-- "1-5,8-8": live numbers and those of a cut, always ascending.
local function ranges_of(line)
  local found = {}
  for first, last in string.gmatch(line, '(%d+)%-(%d+)') do
    found[#found + 1] = {tonumber(first), tonumber(last)}
  end
  return found
end

local function line_of(ranges)
  local parts = {}
  for _, range in ipairs(ranges) do
    parts[#parts + 1] = text(range[1]) .. '-' .. text(range[2])
  end
  return table.concat(parts, ',')
end

local function push(ranges, first, last)
  local before = ranges[#ranges]
  if before and before[2] == first - 1 then
    before[2] = last
  else
    ranges[#ranges + 1] = {first, last}
  end
end

local function numbers_of(line)
  local found = {}
  for _, range in ipairs(ranges_of(line)) do
    for n = range[1], range[2] do found[#found + 1] = n end
  end
  return found
end

local function ranges_from(numbers)
  local found = {}
  for _, n in ipairs(numbers) do push(found, n, n) end
  return found
end

local function newest_of(line) return tonumber(string.match(line, '(%d+)$') or '0') end

local function each_slice(list, visit)
  for first = 1, #list, SLICE do
    local part = {}
    for i = first, math.min(first + SLICE - 1, #list) do part[#part + 1] = list[i] end
    visit(part)
  end
end

local function texts(numbers)
  local found = {}
  for i, n in ipairs(numbers) do found[i] = text(n) end
  return found
end

local function erase(numbers)
  each_slice(texts(numbers), function(part)
    call('HDEL', BODY, unpack(part))
    call('HDEL', INFO, unpack(part))
  end)
end

local function too_new(format) return format and tonumber(format) > FORMAT end

-- Every key of the thread runs out together, and with each write later. Whether what points at
-- the thread from other slots is due to be kept for longer too.
local function keep(ttl, existed, renewed)
  if ttl > 0 then
    local till = text(now + ttl)
    for i = 1, KEPT_KEYS do call('PEXPIREAT', KEYS[i], till) end
    return (not renewed or now - tonumber(renewed) > ttl) and 1 or 0
  end
  if existed and call('PTTL', HEAD) >= 0 then
    for i = 1, KEPT_KEYS do call('PERSIST', KEYS[i]) end
    return 1
  end
  return 0
end

-- What points at threads lives three times as long.
local function keep_apart(ttl, key)
  if ttl == 0 then
    call('PERSIST', key)
  elseif call('PTTL', key) < 3 * ttl then
    call('PEXPIRE', key, text(3 * ttl))
  end
end

-- A thread without a head has nothing else either, unless a server took its keys apart.
local function check_absent()
  if call('EXISTS', BODY, INFO, OPEN, ENDED, ASKED, SETTLED, ROWS, DRAFTS, CUTS) > 0 then
    error('CHATKEEP-CORRUPT thread without its head')
  end
end

-- What is stored under numbers, false for what is not; no more than about so many bytes of it.
local function read_entries(numbers, messages, budget)
  local source = messages == 'bodies' and BODY or INFO
  local values, bytes, step = {}, 0, 1
  while #values < #numbers and bytes < budget do
    local part = {}
    for i = #values + 1, math.min(#values + step, #numbers) do
      part[#part + 1] = text(numbers[i])
    end
    for _, value in ipairs(call('HMGET', source, unpack(part))) do
      bytes = bytes + (value and #value or 0)
      if value and messages == 'digests' then value = string.sub(value, 1, 16) end
      values[#values + 1] = value
    end
    -- As many as there is room for, if they are as long as those so far.
    local room = bytes > 0 and math.floor((budget - bytes) * #values / bytes) or 50
    step = math.max(1, math.min(50, room))
  end
  return values
end
