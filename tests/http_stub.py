"""A server of a test's own: HTTP/1.1 on a free port of this machine, silent, ended with its
block."""

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        # the end of a block waits for one poll
        often = {"poll_interval": 0.02}
        threading.Thread(target=self.serve_forever, kwargs=often, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        super().__exit__(*error)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def reply(
        self,
        status: int,
        body: bytes = b"",
        size: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """size: what the header says where the body is cut."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
