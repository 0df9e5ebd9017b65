"""A hub on 127.0.0.1 for the real huggingface_hub client, with faults on demand.

It answers the three requests that the pinned client needs (dataset description, HEAD and GET of a file) and,
like the hub, sends downloads on to a second address, which must not see the token. A fault is used up by the
request it meets; after the last one the file is served as it should be.
"""

import contextlib
import hashlib
import json
import re
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shard(tokens, magic=20240520, version=1, claim=None, tail=b""):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if claim is None else claim
    return header.tobytes() + np.asarray(tokens, "<u2").tobytes() + tail


def docs(n, length, seed):
    """n random tokens, a document every `length`."""
    tokens = np.random.default_rng(seed).integers(0, 50256, n).astype("<u2")
    tokens[::length] = 50256
    return tokens


def fineweb(n_tokens=2_000, n_train=103):
    """Files like the hub's dataset, small, each with other bytes; the last one is shorter."""
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, n_train + 1))]
    sizes = [n_tokens] * n_train + [n_tokens // 2]
    return {name: shard(docs(n, 100, seed)) for seed, (name, n) in enumerate(zip(names, sizes, strict=True))}


class Hub:
    """files: {name: bytes}; faults: {name or "list": [fault, ...]}.

    Faults: cut (half the bytes, then the connection ends), none (headers, then it ends), short (says half the
    length and keeps to it), stall (half, then silence), slow (half, then a little every 0.2 s), wrong (other
    bytes), 404, 416, 503, and "429 S" with Retry-After S. "head " before it: meets the HEAD request; "stay "
    before it: is never used up.
    """

    def __init__(self, files, faults=None):
        self.files, self.faults = files, {name: list(kinds) for name, kinds in (faults or {}).items()}
        self.requests = []           # (server, method, path, Range, Authorization)
        self.mutex, self.closing = threading.Lock(), threading.Event()
        self.main, self.storage = self.serve("hub"), self.serve("storage")
        self.endpoint = f"http://127.0.0.1:{self.main.server_port}"

    def serve(self, name):
        handler = type("Handler", (HubHandler,), {"hub": self, "server_name": name})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    def take(self, name, method):
        """The fault for this request, or ""."""
        with self.mutex:
            kinds = self.faults.get(name, [])
            if not kinds or ("head " in kinds[0]) != (method == "HEAD"):
                return ""
            kind = kinds[0] if "stay " in kinds[0] else kinds.pop(0)
            return kind.removeprefix("stay ").removeprefix("head ")

    def count(self, name):
        """GET requests for the bytes of a file."""
        return sum(server == "storage" and method == "GET" and path.endswith(name)
                   for server, method, path, *_ in self.requests)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.closing.set()
        for server in (self.main, self.storage):
            server.shutdown()
            server.server_close()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *parts):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):  # the client may have been killed
                self.wfile.write(body)

    def handle_one_request(self):
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.hub
        path = self.path.split("?")[0]
        hub.requests.append((self.server_name, self.command, path, self.headers.get("Range"),
                             self.headers.get("Authorization")))
        name = path.rsplit("/", 1)[-1]
        if match := re.fullmatch(r"/api/datasets/(.+)/revision/main", path):
            if not self.fail("list"):
                self.describe(match[1])
        elif name not in hub.files:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        elif self.server_name == "hub":
            if self.command == "HEAD" and self.fail(name):
                return
            blob = hub.files[name]
            storage = f"http://127.0.0.1:{hub.storage.server_port}"
            self.answer(302, Location=f"{storage}/blob/{name}?Signature=secret", X_Repo_Commit=COMMIT,
                        X_Linked_Size=len(blob), X_Linked_ETag=f'"{hashlib.sha256(blob).hexdigest()}"')
        else:
            self.send_blob(hub.files[name], hub.take(name, "GET"))

    def fail(self, name):
        fault = self.hub.take(name, self.command)
        if fault == "stall":
            self.hub.closing.wait()
        elif fault.startswith("429"):
            self.answer(429, Retry_After=fault.split()[1])
        elif fault:
            self.answer(int(fault))
        return bool(fault)

    def describe(self, repo):
        files = [dict(rfilename=name, size=len(blob), blobId="0" * 40,
                      lfs=dict(sha256=hashlib.sha256(blob).hexdigest(), size=len(blob), pointerSize=134))
                 for name, blob in self.hub.files.items()]
        files.append(dict(rfilename="README.md", size=7, blobId="1" * 40))
        self.answer(200, json.dumps(dict(id=repo, sha=COMMIT, siblings=files)).encode())

    def send_blob(self, blob, fault):
        start = 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(wanted[1])
        if fault in ("404", "416", "503"):
            self.answer(int(fault), Content_Range=f"bytes */{len(blob)}")
            return
        if fault.startswith("429"):
            self.answer(429, Retry_After=fault.split()[1])
            return
        if fault == "wrong":
            blob = blob[:-2] + struct.pack("<H", (int.from_bytes(blob[-2:], "little") + 1) % 50256)
        body = blob[start:]
        if fault == "short":
            body, start = body[:len(body) // 2], 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(blob) - 1}/{len(blob)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        half = {"cut": 0.5, "stall": 0.5, "slow": 0.5, "none": 0}.get(fault, 1)
        half = int(half * len(body))
        with contextlib.suppress(OSError):
            self.wfile.write(body[:half])
            self.wfile.flush()
            while fault == "slow" and half < len(body) and not self.hub.closing.is_set():
                self.wfile.write(body[half:half + 100_000])
                half += 100_000
                time.sleep(0.2)
        if fault == "stall":
            self.hub.closing.wait()
        if fault in ("stall", "cut", "none"):
            self.close_connection = True

