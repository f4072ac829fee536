"""A hub for data sets on this machine: what the library asks of one, and answers that fail when a test says so."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """Serves ROOT/USER/NAME/COMMIT/...; ROOT/USER/NAME/main says which commit the branch is at.

    `fails` is a pattern of request lines ("GET /...") -> how often, and the status; status 0 resets the connection.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Answer)
        self.root, self.fails, self.lock = root, {}, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def failure(self, line: str) -> int | None:
        """The status that this request is to have, where it is to fail."""
        with self.lock:
            for pattern, (times, status) in self.fails.items():
                if times and re.search(pattern, line):
                    self.fails[pattern] = (times - 1, status)
                    return status
        return None

    def handle_error(self, *_):
        """A client that went away is nothing to talk about."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def say(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        status = self.server.failure(f"{self.command} {self.path}")
        if status == 0:
            self.close_connection = True
            return self.connection.close()
        if status:
            return self.say(b"{}", status)
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/datasets/(\w+/\w+)/resolve/(\w+)/(.+)", path):
            return self.send_file(*found.groups())
        if found := re.fullmatch(r"/api/datasets/(\w+/\w+)(?:/(revision|tree|paths-info)/(\w+)/?(.*))?", path):
            return self.describe(*found.groups(), sent)
        return self.say(b"{}", 404)

    do_HEAD = do_POST = do_GET

    def commit(self, name: str, revision: str | None) -> tuple[str, Path]:
        main = self.server.root / name / "main"
        commit = main.read_text() if revision in (None, "main") and main.exists() else str(revision)
        return commit, self.server.root / name / commit

    def send_file(self, name: str, revision: str, inside: str) -> None:
        commit, base = self.commit(name, revision)
        if not (base / inside).is_file():
            return self.say(b"{}", 404, X_Error_Code="EntryNotFound")
        data, headers = (base / inside).read_bytes(), {"X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            span = f"bytes {first}-{last}/{len(data)}"
            return self.say(data[first : last + 1], 206, Content_Range=span, **headers)
        return self.say(data, **headers)

    def describe(self, name: str, what: str | None, revision: str | None, inside: str | None, sent: str) -> None:
        commit, base = self.commit(name, revision)
        if not base.is_dir():
            return self.say(b"{}", 404, X_Error_Code="RepoNotFound")
        files = {str(file.relative_to(base)): file for file in sorted(base.rglob("*"))}
        if what in (None, "revision"):
            siblings = [{"rfilename": path} for path, file in files.items() if file.is_file()]
            return self.say(json.dumps({"id": name, "sha": commit, "siblings": siblings, "tags": []}).encode())
        if what == "paths-info":
            asked = json.loads(sent)["paths"] if sent.startswith("{") else parse_qs(sent).get("paths", [])
            found = [path for path in asked if path in files]
        else:
            deep = "recursive=true" in self.path.lower()
            found = [p for p in files if p.startswith(inside) and p != inside]
            found = [p for p in found if deep or Path(p).parent == Path(inside)]
            if inside and inside not in files:
                return self.say(b"{}", 404, X_Error_Code="EntryNotFound")
        return self.say(json.dumps([self.entry(path, files[path]) for path in found]).encode())

    def entry(self, path: str, file: Path) -> dict:
        kind, size = ("file", file.stat().st_size) if file.is_file() else ("directory", 0)
        return {"type": kind, "path": path, "size": size, "oid": hashlib.sha1(path.encode()).hexdigest()}
