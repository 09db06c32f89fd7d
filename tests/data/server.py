"""A real HTTP server on the loopback that can be told to misbehave."""

import contextlib
import http.server
import pathlib
import re
import threading

_PIECE = 1 << 20


class Server(http.server.ThreadingHTTPServer):
    """Serves the files of a folder, ranges of them included; what to do otherwise is in its attributes."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = pathlib.Path(folder)
        self.address = f"http://127.0.0.1:{self.server_port}/"
        self.cut = None  # bytes after which every connection ends
        self.knows_ranges = True
        self.answers = {}  # name -> (status, content type, body)
        self.between = lambda: None  # what is done after each piece of a file
        self.has_no_end = False  # a file is sent again and again, and no size is said
        self.busy = 0  # so many requests get status 503
        self.asked = []  # (path, Range)
        self.sent = 0  # bytes of files

    def handle_error(self, request, client_address):
        """A client that goes away is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, path = self.server, self.path.split("?")[0].lstrip("/")
        server.asked.append((path, self.headers.get("Range")))
        if server.busy:
            server.busy -= 1
            return self._answer(503, "text/plain", b"busy")
        if path in server.answers:
            return self._answer(*server.answers[path])
        file = server.folder / path
        if not file.is_file():
            return self._answer(404, "text/html", b"<html>no such page</html>")
        if server.has_no_end:
            return self._answer_for_long(file.read_bytes())
        content, size = file.read_bytes(), file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if server.knows_ranges else None
        start = int(wanted[1]) if wanted else 0
        if wanted and start >= size:
            return self._answer(416, "text/plain", b"")
        more = {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if wanted else {}
        # As Apache labels .gz files: a client that believes it would unpack them.
        return self._answer(
            206 if wanted else 200, "application/octet-stream", content[start:], more | {"Content-Encoding": "x-gzip"}
        )

    def _answer_for_long(self, piece):
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        for _ in range(100):
            self.wfile.write(piece)

    def _answer(self, status, kind, body, more=()):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **dict(more)}.items():
            self.send_header(name, value)
        self.end_headers()
        part = body[: self.server.cut] if status in (200, 206) else body
        for start in range(0, len(part), _PIECE):
            # Counted first: the client may have all, and its test go on, before this thread has its turn again.
            self.server.sent += len(part[start : start + _PIECE]) if status in (200, 206) else 0
            self.wfile.write(part[start : start + _PIECE])
            self.server.between()
        if len(part) < len(body):
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, *_):
        """Says nothing."""


@contextlib.contextmanager
def serving(folder):
    """A running `Server` of a folder."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
