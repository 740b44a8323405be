# Keeps public answers for exactly as long as their Cache-Control says, before one gateway or an
# nginx that spreads over several. Start it with
#   varnishd -f /etc/varnish/default.vcl -a :80 -s malloc,4G -p http_gzip_support=off
# Without that parameter Varnish asks for gzip in the name of clients, and inflates it by itself.
vcl 4.1;

import std;

backend default {
    .host = "127.0.0.1";
    .port = "8000";
    .first_byte_timeout = 310s;  # longer than nginx waits for a write; gateways end reads earlier
}

acl purgers {
    "127.0.0.1";
    "::1";
}

sub vcl_recv {
    # The id of a client, if a gateway would keep it.
    if (req.http.X-Request-ID !~ "^[\x21-\x7e]{1,128}$") {
        set req.http.X-Request-ID = req.xid;
    }
    # A gateway would believe it. What is below a path has server.root_path.
    unset req.http.X-Forwarded-Prefix;
    if (req.method == "PURGE") {
        # A second address is that of a client whose request a proxy passes on.
        if (client.ip !~ purgers || req.http.X-Forwarded-For ~ ",") {
            return (synth(403));
        }
        return (purge);
    }
    # Kept are answers to a plain GET of a key. Ranges and HEAD count inflated bytes where an object
    # has a content coding, and preconditions ask for the version in the store.
    if (req.method != "GET" || req.http.Range || req.http.If-Match || req.http.If-Unmodified-Since
        || req.http.Authorization || req.http.Amz-Sdk-Invocation-Id || req.http.Cookie
        || req.url ~ "[?]|(?i)/(~|%7e|@session[.])|/$|^/[^/]*$"
        || req.url ~ "^/(api|docs|redoc|viewer|login|auth_info|_shard)/") {
        return (pass);
    }
    return (hash);
}

# The path alone: a purge needs no name of the host.
sub vcl_hash {
    hash_data(req.url);
    return (lookup);
}

sub vcl_backend_response {
    # Varnish serves what is over for 10 s more unless it is told otherwise. Absence would be fill
    # value there; a gateway gives no leave for it.
    if (beresp.http.Cache-Control !~ "(?i)stale-while-revalidate") {
        set beresp.grace = 0s;
    }
    # What is over is asked for by its ETag for a day, and a gateway then sends no body.
    if (beresp.http.ETag) {
        set beresp.keep = 1d;
    }
    # Nor is an object kept that would take the place of a thousand chunks.
    if (std.integer(beresp.http.Content-Length, 0) >= 100000000) {
        set beresp.uncacheable = true;
    }
}

# A page can read no error without CORS, and Neuroglancer repeats 503.
sub vcl_backend_error {
    set beresp.http.Access-Control-Allow-Origin = "*";
    set beresp.http.Cache-Control = "no-store";
    set beresp.http.Content-Type = "application/problem+json";
    set beresp.http.Retry-After = "1";
    set beresp.body = """{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"no gateway answered"}""";
    return (deliver);
}

sub vcl_deliver {
    set resp.http.X-Request-ID = req.http.X-Request-ID;
    if (obj.uncacheable) {
        return (deliver);
    }
    if (obj.hits == 0) {
        set resp.http.X-Cache = "miss";
    } elsif (obj.ttl < 0s) {
        set resp.http.X-Cache = "stale";
    } else {
        set resp.http.X-Cache = "hit";
    }
}
