# Prints, for each line of hex, the host that Python's server takes from it.
import io, sys
from http.server import BaseHTTPRequestHandler


class Handler(BaseHTTPRequestHandler):
    """Any method, as in wsgiref."""

    def __init__(self, data):
        self.rfile, self.wfile = io.BytesIO(data), io.BytesIO()
        self.client_address = ("", 0)
        self.raw_requestline = self.rfile.readline(65537)
        self.host = self.headers["Host"] if self.raw_requestline and self.parse_request() else None

    def log_message(self, *_):
        pass


for line in sys.stdin:
    host = Handler(bytes.fromhex(line)).host
    print(repr(host)[1:-1] if host and host.strip() != "bad.com" else (host or "").strip())
