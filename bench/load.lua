-- wrk's part of the load: chats of one length that share system prompts. So many sessions are under way; each says its
-- chat a few times, its turns, and another takes its place.
-- Arguments: the body's length in bytes, a connection's mean pause between an answer and its next request in ms
-- (exponential; 0: none), and the turns of a session. Prints one JSON object at the end.
local SYSTEM_PROMPTS, UNDER_WAY, BUDGET = 5, 64, 64 * 1024 * 1024
local bodies = {}
local path = "/v1/chat/completions"
local pause_ms = 0
local turns = 8
local begun = 0
local sessions = {}

local function chat(number, size)
  local tail = string.format('"},{"role":"user","content":"I am user %d, please go on."}]}', number)
  local head = string.format('{"model":"m","stream":false,"max_tokens":1,"messages":[{"role":"system","content":"You are assistant %d. ', number % SYSTEM_PROMPTS)
  local words = "Answer in one sentence, and stay with what the documents say. "
  local room = size - #head - #tail
  local shared = string.rep(words, math.floor(room / 2 / #words))
  local turn = string.format('"},{"role":"user","content":"This is chat %d. ', number)
  local own = string.rep("And what would you say about that, all things considered? ", math.max(0, math.floor((room - #shared - #turn) / 58)))
  local body = head .. shared .. turn .. own
  return body .. string.rep(".", math.max(0, size - #body - #tail)) .. tail
end

function init(args)
  local size = tonumber(args[1])
  pause_ms = tonumber(args[2] or "0")
  turns = tonumber(args[3] or "8")
  math.randomseed(os.time())
  for number = 1, math.max(4, math.min(256, math.floor(BUDGET / size))) do
    bodies[number] = chat(number, size)
  end
end

function request()
  local place = math.random(UNDER_WAY)
  local session = sessions[place]
  if session == nil or session.left == 0 then
    begun = begun + 1
    -- The first ones are met in the middle, or all would end together.
    local left = session == nil and math.random(turns) or turns
    session = { id = string.format("user-%d-%d", os.time(), begun), body = bodies[begun % #bodies + 1], left = left }
    sessions[place] = session
  end
  session.left = session.left - 1
  local headers = { ["content-type"] = "application/json", ["x-session-id"] = session.id }
  return wrk.format("POST", path, headers, session.body)
end

function delay()
  return pause_ms > 0 and math.floor(0.5 - pause_ms * math.log(1 - math.random())) or 0
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format('{"requests": %d, "seconds": %.6f, "p50_ms": %.3f, "p99_ms": %.3f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    e.connect + e.read + e.write + e.status + e.timeout))
end
