"""A real HTTP server on the loopback in place of the Hugging Face Hub, with one dataset."""

import hashlib
import json
import pathlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves the files in a folder as the dataset `name`, OWNER/NAME; `asked` are the paths that were asked for."""

    def __init__(self, name: str, folder: pathlib.Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.folder, self.asked = name, folder, list[str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        name = self.server.name
        files = {file.name: file.read_bytes() for file in sorted(self.server.folder.iterdir())}
        _, _, file = path.removeprefix(f"/datasets/{name}/resolve/").partition("/")
        if path == f"/api/datasets/{name}" or path.startswith(f"/api/datasets/{name}/revision/"):
            about = {"id": name, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": []}
            self._send(200, json.dumps(about | {"siblings": [{"rfilename": one} for one in files]}).encode())
        elif path.startswith(f"/api/datasets/{name}/tree/"):
            listed = [{"type": "file", "path": one, "size": len(x), "oid": _digest(x)} for one, x in files.items()]
            self._send(200, json.dumps(listed).encode())
        elif path.startswith(f"/datasets/{name}/") and file in files:
            self._send(200, files[file], {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(files[file])}"'})
        else:
            missing = "EntryNotFound" if path.startswith(f"/datasets/{name}/") else "RepoNotFound"
            self._send(404, b"", {"X-Error-Code": missing, "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
