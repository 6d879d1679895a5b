"""A right receiver that loses answers, by Python's standard library alone: for the tests of the judge.

    WEBHOOK_SECRET=whsec_… python3 lossy.py --listen [::1]:3000 --database events.db

A delivery is a POST of Standard Webhooks. One transaction inserts the key and the effect. Every second event loses its
first answer: the connection is closed before it or in the middle of it. Events show in the counts `--late` seconds after
they have taken effect.
"""

import argparse
import base64
import hashlib
import hmac
import json
import os
import socketserver
import sqlite3
import time
from urllib.parse import parse_qs, urlsplit

SECRET = base64.b64decode(os.environ["WEBHOOK_SECRET"].removeprefix("whsec_"))
RUNS = {}


def connect():
    return sqlite3.connect(DATABASE, isolation_level=None, timeout=30)


class Connection(socketserver.StreamRequestHandler):
    def handle(self):
        try:
            self.receive()
        except (ConnectionError, ValueError):
            pass  # a client that has gone, or that does not speak HTTP

    def receive(self):
        method, path, _ = self.rfile.readline().decode("latin-1").split()
        headers = {}
        while line := self.rfile.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers.setdefault(name.lower(), []).append(value.strip())
        if method == "GET":
            return self.answer(200, self.counts())
        body = self.body(headers)
        if body is None:
            return
        event, time_, signature = [
            ",".join(headers.get(f"webhook-{name}", [])) for name in ["id", "timestamp", "signature"]
        ]
        code = hmac.new(SECRET, f"{event}.{time_}.".encode("latin-1") + body, hashlib.sha256)
        expected = "v1," + base64.b64encode(code.digest()).decode()
        if signature != expected or abs(time.time() - int(time_)) > 300:
            return self.answer(401)
        if not event.isascii() or not event:
            return self.answer(400)
        run = RUNS[event] = RUNS.get(event, 0) + 1
        status = self.work(event, run, parse_qs(urlsplit(path).query))
        is_slow = "?" in path
        if run == 1 and not is_slow and int(event[-1], 36) % 2:
            if int(event[-1], 36) % 4 == 1:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of")
            return
        self.answer(status)

    def body(self, headers):
        if "transfer-encoding" not in headers:
            length = int(headers["content-length"][0])
            body = self.rfile.read(length)
            return body if len(body) == length else None
        body = b""
        while size := int(self.rfile.readline(), 16):
            chunk = self.rfile.read(size + 2)
            if len(chunk) < size + 2:
                return None
            body += chunk[:-2]
        return body

    def work(self, event, run, query):
        time.sleep(int(query.get("delay_ms", ["20"])[0]) / 1000)
        if run <= int(query.get("fail_runs", ["0"])[0]):
            return 500
        with connect() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO effects VALUES (?, ?) ON CONFLICT DO NOTHING", (event, time.time()))
            db.execute("COMMIT")
        time.sleep(int(query.get("delay_after_ms", ["0"])[0]) / 1000)
        return 200

    def counts(self):
        with connect() as db:
            shown = time.time() - options.late
            rows = db.execute("SELECT id FROM effects WHERE at <= ?", (shown,)).fetchall()
        return json.dumps([{"id": row[0], "count": 1} for row in rows]).encode()

    def answer(self, status, body=b""):
        self.wfile.write(b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))


class Server(socketserver.ThreadingTCPServer):
    address_family = socketserver.socket.AF_INET6
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128


parser = argparse.ArgumentParser()
parser.add_argument("--listen", default="[::1]:3000")
parser.add_argument("--database", default="events.db")
parser.add_argument("--late", type=float, default=0)
options = parser.parse_args()
DATABASE = options.database
with connect() as db:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE IF NOT EXISTS effects (id TEXT PRIMARY KEY, at REAL)")
host, port = options.listen.rsplit(":", 1)
Server((host.strip("[]"), int(port)), Connection).serve_forever()
