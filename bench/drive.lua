-- Sends the request of a file, a fixed number of times, each under a number of its own.
--
--   wrk -t1 -c64 -d60s -s bench/drive.lua http://127.0.0.1:PORT -- FILE COUNT CONNECTIONS
--
-- The file is a whole HTTP request in which "%%%%%%%%%%%%" (twelve) becomes the number, and any
-- "####" behind it one of 50 numbers, which take turns. One line is printed before the first
-- request, one when all are answered; then wrk is to be interrupted, which makes it print its
-- summary.

local before, after, turns, count, sent, made, idle, conns

function init(args)
  local file = assert(io.open(args[1], "rb"))
  local text = file:read("*a")
  file:close()
  count = tonumber(args[2])
  conns = tonumber(args[3])
  sent, made, idle = 0, 0, 0
  local mark = string.rep("%%", 12)
  local first, last = string.find(text, mark)
  if first then
    before, after = string.sub(text, 1, first - 1), string.sub(text, last + 1)
    turns = string.find(after, "####") ~= nil
  else
    before = text
  end
end

-- Called before each request of each connection: milliseconds to wait.
function delay()
  if sent == 0 and idle == 0 then
    io.write("begun\n")
    io.flush()
  end
  if sent < count then
    sent = sent + 1
    return 0
  end
  -- This connection's last request is answered, and it sends no more.
  idle = idle + 1
  if idle == conns then
    io.write("answered\n")
    io.flush()
  end
  return 3600000
end

function request()
  if after then
    made = made + 1
    local rest = after
    if turns then
      rest = string.gsub(after, "####", string.format("%04d", made % 50))
    end
    return before .. string.format("%012d", made) .. rest
  end
  return before
end
