"""The Lua scripts of store_redis: each is one atomic step, and each may be run twice with the same effect as once.

They use what Redis 7 and Valkey both have. A session's record is a hash (json, secret, model, prompt, epoch, tip,
finish, counters, created); its tokens are a string of uint32 LE, so the tip is STRLEN / 4.
"""

from __future__ import annotations

CREATE = """
-- KEYS: record, tokens, kinds, connection, live.  ARGV: session, secret, json, epoch, prompt length, counters,
-- tokens, kinds, connection, ttl
local known = redis.call('HGET', KEYS[1], 'secret')
if known then return known == ARGV[2] and 'same' or 'other' end
redis.call('HSET', KEYS[1], 'secret', ARGV[2], 'json', ARGV[3], 'epoch', ARGV[4], 'prompt', ARGV[5])
redis.call('HSET', KEYS[1], 'counters', ARGV[6])
redis.call('SET', KEYS[2], ARGV[7])
redis.call('SET', KEYS[3], ARGV[8])
redis.call('SET', KEYS[4], ARGV[9])
for i = 1, 4 do redis.call('EXPIRE', KEYS[i], ARGV[10]) end
redis.call('SADD', KEYS[5], ARGV[1])
return 'made'
"""

APPEND = """
-- KEYS: record, tokens, kinds, logprobs, connection, placement, live.  ARGV: session, epoch, at, tokens, kinds,
-- counters, finish or '', ttl, ttl when finished, logprobs (one JSON each)...
-- Answers {'ok', tail, kinds, finish} or {reason, length, epoch}. Epochs are decimal strings: compared as numbers they
-- stay exact below 2^53, and microseconds since 1970 reach that in the year 2255.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then return {'missing', 0, '0'} end
local at, length = tonumber(ARGV[3]), redis.call('STRLEN', KEYS[2]) / 4
local finish = redis.call('HGET', KEYS[1], 'finish') or ''
local fenced = tonumber(ARGV[2]) < tonumber(epoch)
if finish ~= '' or (length > at and not fenced) then
  local done = math.max(0, at - tonumber(redis.call('HGET', KEYS[1], 'prompt')))
  return {'ok', redis.call('GETRANGE', KEYS[2], at * 4, -1), redis.call('GETRANGE', KEYS[3], done, -1), finish}
end
if fenced then return {'stale_epoch', length, epoch} end
if length < at then return {'gap', length, epoch} end
redis.call('APPEND', KEYS[2], ARGV[4])
redis.call('APPEND', KEYS[3], ARGV[5])
for i = 10, #ARGV do redis.call('RPUSH', KEYS[4], ARGV[i]) end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'counters', ARGV[6])
local ttl = ARGV[8]
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[1], 'finish', ARGV[7])
  redis.call('SREM', KEYS[7], ARGV[1])
  ttl = ARGV[9]
end
for i = 1, 6 do redis.call('EXPIRE', KEYS[i], ttl) end
return {'ok', ARGV[4], ARGV[5], ARGV[7]}
"""

LOAD = """
-- KEYS: record, tokens, kinds, logprobs, connection, placement.  ARGV: epoch to raise the record to, or ''.
-- Answers nothing when there is no such record, {'stale_epoch', epoch} when it is higher already.
local fields = redis.call('HMGET', KEYS[1], 'json', 'epoch', 'counters', 'finish')
if not fields[1] then return {} end
if ARGV[1] ~= '' then
  if tonumber(ARGV[1]) < tonumber(fields[2]) then return {'stale_epoch', fields[2]} end
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
  fields[2] = ARGV[1]
end
return {'ok', fields[1], fields[2], fields[3], fields[4] or '', redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3]),
        redis.call('LRANGE', KEYS[4], 0, -1), redis.call('GET', KEYS[5]) or '0',
        redis.call('HGET', KEYS[6], 'verifier') or ''}
"""

CONNECTION = """
-- KEYS: record, connection.  The next connection number, 0 when there is no such record.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local number = redis.call('INCR', KEYS[2])
redis.call('EXPIRE', KEYS[2], redis.call('TTL', KEYS[1]))
return number
"""

PLACE = """
-- KEYS: record, placement.  ARGV: epoch, verifier
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then return {'missing', '0'} end
if tonumber(ARGV[1]) < tonumber(epoch) then return {'stale_epoch', epoch} end
if redis.call('HGET', KEYS[2], 'verifier') ~= ARGV[2] then redis.call('HINCRBY', KEYS[2], 'moves', 1) end
redis.call('HSET', KEYS[2], 'verifier', ARGV[2], 'epoch', ARGV[1])
redis.call('EXPIRE', KEYS[2], redis.call('TTL', KEYS[1]))
return {'ok', epoch}
"""

ACQUIRE = """
-- KEYS: lease, owner, lease, owner, ...  ARGV: owner, ttl in ms.  For each pair the epoch, '' when it is another's.
-- A new owner's epoch is the server's clock in microseconds: higher than any before, also after the store lost its
-- data. An owner that was the last one keeps its epoch, whether or not its lease ran out meanwhile.
local now = redis.call('TIME')
local clock = tonumber(now[1]) * 1000000 + tonumber(now[2])
local held = {}
for i = 1, #KEYS, 2 do
  local holder = redis.call('GET', KEYS[i])
  if holder and holder ~= ARGV[1] then
    held[#held + 1] = ''
  else
    local last = redis.call('HMGET', KEYS[i + 1], 'owner', 'epoch')
    local epoch = last[2]
    if last[1] ~= ARGV[1] then
      epoch = string.format('%.0f', math.max(clock, tonumber(last[2] or '0') + 1))
      redis.call('HSET', KEYS[i + 1], 'owner', ARGV[1], 'epoch', epoch)
    end
    redis.call('SET', KEYS[i], ARGV[1], 'PX', ARGV[2])
    held[#held + 1] = epoch
  end
end
return held
"""

RELEASE = """
-- KEYS: leases.  ARGV: owner
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then redis.call('DEL', key) end
end
return 0
"""

HEARTBEAT = """
-- KEYS: batchers (scored by the ms at which they count as gone).  ARGV: owner, ttl in ms.  How many are alive.
local now = redis.call('TIME')
local clock = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('ZADD', KEYS[1], clock + tonumber(ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', clock)
return redis.call('ZCARD', KEYS[1])
"""
