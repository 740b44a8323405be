-- Sends the requests of a file in turn: each line a path and, after tabs, "Name: value" headers.

local requests, position = {}, 0

function init(args)
  for line in io.lines(args[1]) do
    local path, headers = nil, {}
    for field in line:gmatch("[^\t]+") do
      if path then
        local name, value = field:match("^([^:]+): (.*)$")
        headers[name] = value
      else
        path = field
      end
    end
    requests[#requests + 1] = wrk.format("GET", path, headers)
  end
end

function request()
  position = position % #requests + 1
  return requests[position]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "seconds": %f, "bytes": %d, "p50_ms": %f, "p99_ms": %f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6, summary.bytes,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
