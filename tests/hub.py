"""A hub for datasets on this machine: what the library asks of one, and answers that fail when a test says so."""

import hashlib
import json
import os
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

ALWAYS = 10**9
TOKEN = "hf_of_the_tests"


@dataclass
class Fault:
    """What happens to the next `times` requests, after `passed` that are answered well."""

    status: int = 503  # 0 resets the connection; 200 is an answer
    times: int = ALWAYS
    passed: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False  # the connection is reset in the middle of the answer
    stall: float = 0.0  # seconds before the answer


class Hub(ThreadingHTTPServer):
    """Serves ROOT/USER/NAME/COMMIT/...; ROOT/USER/NAME/main says which commit the branch is at.

    It is where HF_ENDPOINT says, which `conftest.py` sets before the server of forks starts: libraries read it once.
    The file ROOT/USER/NAME/access may say `gated` (for who has the token) or `disabled`. `faults` is a pattern of
    request lines ("GET /...") -> what happens to them; the first that matches counts. `asked` are all request lines.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", urlsplit(os.environ["HF_ENDPOINT"]).port), Answer)
        self.root, self.lock = root, threading.Lock()
        self.faults: dict[str, Fault] = {}
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fault(self, line: str) -> Fault | None:
        """What is to happen to this request; None: nothing."""
        with self.lock:
            self.asked.append(line)
            found = next((fault for pattern, fault in self.faults.items() if re.search(pattern, line)), None)
            if found and found.passed:
                found.passed -= 1
            elif found and found.times:
                found.times -= 1
                return found
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
            self.wfile.write(body[: len(body) // 2] if self.cut else body)
        if self.cut:
            self.reset()

    def reset(self) -> None:
        """End the connection as a machine that is gone does."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    cut = False

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        fault = self.server.fault(f"{self.command} {self.path}") or Fault(200)
        self.cut = fault.cut
        time.sleep(fault.stall)
        if fault.status == 0:
            return self.reset()
        if fault.status != 200:
            return self.say(b"{}", fault.status, **fault.headers)
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/datasets/(\w+/\w+)/resolve/(\w+)/(.+)", path):
            return self.refused(found[1]) or self.send_file(*found.groups())
        if found := re.fullmatch(r"/api/datasets/(\w+/\w+)(?:/(revision|tree|paths-info)/(\w+)/?(.*))?", path):
            return self.refused(found[1]) or self.describe(*found.groups(), sent)
        return self.say(b"{}", 404)

    do_HEAD = do_POST = do_GET

    def refused(self, name: str) -> bool:
        """Whether a dataset is not for who asks; says so."""
        access = self.server.root / name / "access"
        kind = access.read_text() if access.exists() else ""
        if kind == "disabled":
            self.say(b"{}", 403, X_Error_Message="Access to this resource is disabled.")
        elif kind == "gated" and "api" not in self.path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.say(b"{}", 401, X_Error_Code="GatedRepo", X_Error_Message=f"Access to {name} is restricted.")
        else:
            return False
        return True

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
