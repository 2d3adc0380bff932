"""A W&B server on this host, as far as W&B's own client speaks to one: keeps what an online run sends."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_RUN = {
    "id": "run",
    "name": "run",
    "config": "{}",
    "historyLineCount": 0,
    "project": {"id": "project", "name": "project", "entity": {"id": "entity", "name": "team"}},
}
_SEQUENCE = {"id": "sequence", "latestArtifact": {"id": "artifact", "versionIndex": 0}}
# One answer holds every field that the client asks for, whatever it asks.
_ANSWER: dict[str, Any] = {
    "project": None,  # no artifact of any type is there yet
    "viewer": {"id": "user", "entity": "team", "username": "user", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"features": [], "cliVersionInfo": {}, "latestLocalVersionInfo": None},
    "upsertBucket": {"bucket": _RUN, "inserted": True},
    # "COMMITTED": the server says that it holds this content, so the client uploads nothing.
    "createArtifact": {"artifact": {"id": "artifact", "state": "COMMITTED", "artifactSequence": _SEQUENCE}},
    "createRunFiles": {"runID": "run", "uploadHeaders": [], "files": []},
    "notifyScriptableRunAlert": {"success": True},
}


@dataclass(slots=True)
class Received:
    """What arrived.

    Attributes:
        address: of the server.
        history: rows of every ``file_stream`` request, in order.
        alerts: variables of every alert.
        complete: True once the client said that the run has ended.
    """

    address: str
    history: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False


@contextmanager
def wandb_server() -> Iterator[Received]:
    """Serve on a free port for the length of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    received = server.received = Received(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        received: Received = self.server.received  # type: ignore[attr-defined]
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            if "notifyScriptableRunAlert" in asked["query"]:
                received.alerts.append(asked["variables"])
            self._answer({"data": _ANSWER})
            return
        if self.path.endswith("/file_stream"):
            sent = json.loads(body)
            rows = sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            received.history += [json.loads(row) for row in rows]
            received.complete |= bool(sent.get("complete"))
        self._answer({})

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: standard error belongs to the test."""

    def _answer(self, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
