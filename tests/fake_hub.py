"""A fake hub for datasets on this machine: it answers the requests of `datasets`, and fails when a test says so.

It cannot show what the real one does beyond these answers: TLS, redirects to other servers, its own storage (Xet),
limits of requests, and changes of its API, which is written down here as it was when this was written.
"""

import hashlib
import json
import os
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

ALWAYS = 10**9
TOKEN = "hf_of_the_tests"
FILE_URL = re.compile(r"/datasets/(\w+/\w+)/resolve/(\w+)/(.+)")
API_URL = re.compile(r"/api/datasets/(\w+/\w+)(?:/(revision|tree|paths-info)/(\w+)/?(.*))?")


@dataclass
class Fault:
    """What happens to the next `times` requests, after `passed` that are answered well."""

    status: int = 503
    """0 resets the connection; 200 is an answer."""
    times: int = ALWAYS
    passed: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """Whether the connection is reset in the middle of the answer."""


class FakeHub(ThreadingHTTPServer):
    """Serves ROOT/USER/NAME/COMMIT/...; ROOT/USER/NAME/main has the commit of the branch.

    Its address is HF_ENDPOINT, which `conftest.py` sets before the server of forks starts: libraries read it once.
    The file ROOT/USER/NAME/access may be `gated` (for requests without the token) or `disabled`.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", urlsplit(os.environ["HF_ENDPOINT"]).port), FakeHubHandler)
        self.root = root
        self.birds = root / "owner" / "birds"
        self.lock = threading.Lock()
        self.faults: dict[str, Fault] = {}
        """Pattern of request lines ("GET /...") -> their fault; the first that matches counts."""
        self.requests: list[str] = []
        """All request lines."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def next_fault(self, line: str) -> Fault | None:
        """The fault of this request; None: it is answered well."""
        with self.lock:
            self.requests.append(line)
            for pattern, fault in self.faults.items():
                if re.search(pattern, line):
                    if fault.passed:
                        fault.passed -= 1
                    elif fault.times:
                        fault.times -= 1
                        return fault
                    break
        return None

    def handle_error(self, *_):
        """A client that went away is no error."""


class FakeHubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cut = False

    def log_message(self, *_):
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        fault = self.server.next_fault(f"{self.command} {self.path}") or Fault(200)
        self.cut = fault.cut
        if fault.status == 0:
            return self.reset()
        if fault.status != 200:
            return self.send(b"{}", fault.status, **fault.headers)
        path = unquote(urlsplit(self.path).path)
        if url := FILE_URL.fullmatch(path):
            return self.refuse(url[1]) or self.send_file(*url.groups())
        if url := API_URL.fullmatch(path):
            return self.refuse(url[1]) or self.send_description(*url.groups(), body)
        return self.send(b"{}", 404)

    do_HEAD = do_POST = do_GET

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        headers["Content-Length"] = str(len(body))
        for name, value in headers.items():
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

    def refuse(self, name: str) -> bool:
        """Refuse a request for a dataset that is disabled or gated. Whether it was refused."""
        access = self.server.root / name / "access"
        kind = access.read_text() if access.exists() else ""
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if kind == "disabled":
            self.send(b"{}", 403, X_Error_Message="Access to this resource is disabled.")
        elif kind == "gated" and "api" not in self.path and not has_token:
            self.send(b"{}", 401, X_Error_Code="GatedRepo", X_Error_Message=f"Access to {name} is restricted.")
        else:
            return False
        return True

    def find_commit(self, name: str, revision: str | None) -> tuple[str, Path]:
        """The commit of a revision, and its folder."""
        main = self.server.root / name / "main"
        commit = main.read_text() if revision in (None, "main") and main.exists() else str(revision)
        return commit, main.with_name(commit)

    def send_file(self, name: str, revision: str, inside: str) -> None:
        commit, folder = self.find_commit(name, revision)
        if not (folder / inside).is_file():
            return self.send(b"{}", 404, X_Error_Code="EntryNotFound")
        data = (folder / inside).read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {"X_Repo_Commit": commit, "Accept_Ranges": "bytes", "ETag": etag}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self.send(data, **headers)
        first = int(span[1])
        part = data[first : int(span[2] or len(data)) + 1]
        headers["Content_Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self.send(part, 206, **headers)

    def send_description(self, name: str, kind: str | None, revision: str | None, inside: str, body: str) -> None:
        """Send the answer of the API about a dataset or some of its files.

        Args:
            kind: None or revision: the dataset; tree: a folder `inside`; paths-info: the paths of the body.
        """
        commit, folder = self.find_commit(name, revision)
        if not folder.is_dir():
            return self.send(b"{}", 404, X_Error_Code="RepoNotFound")
        files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*"))}
        if kind in (None, "revision"):
            siblings = [{"rfilename": path} for path, file in files.items() if file.is_file()]
            return self.send_json({"id": name, "sha": commit, "siblings": siblings, "tags": []})
        if kind == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            paths = [path for path in wanted if path in files]
        elif inside and inside not in files:
            return self.send(b"{}", 404, X_Error_Code="EntryNotFound")
        else:
            paths = [path for path in files if path.startswith(inside) and path != inside]
            if "recursive=true" not in self.path.lower():
                paths = [path for path in paths if Path(path).parent == Path(inside)]
        return self.send_json([describe_entry(path, files[path]) for path in paths])

    def send_json(self, answer: dict | list) -> None:
        self.send(json.dumps(answer).encode())


def describe_entry(path: str, file: Path) -> dict:
    """A file or folder as the hub's API describes it."""
    return {
        "type": "file" if file.is_file() else "directory",
        "path": path,
        "size": file.stat().st_size if file.is_file() else 0,
        "oid": hashlib.sha1(path.encode()).hexdigest(),
    }
