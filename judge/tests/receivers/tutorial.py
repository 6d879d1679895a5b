"""A receiver as tutorials write it, by Python's standard library alone: for the tests of the judge.

    WEBHOOK_SECRET=secret python3 tutorial.py --listen 127.0.0.1:3000 --database events.db

A delivery is a POST of GitHub. The signature is right, and there is a table of processed events.
"""

import argparse
import hashlib
import hmac
import json
import os
import sqlite3
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

SECRET = os.environ["WEBHOOK_SECRET"].encode()
RUNS = {}


def connect():
    return sqlite3.connect(DATABASE, isolation_level=None)  # each statement commits


def work(event_id, query):
    """Charges the customer, then sends a receipt."""
    with connect() as db:
        db.execute("INSERT INTO effects (id) VALUES (?)", (event_id,))
    time.sleep(max(20, int(query.get("delay_ms", ["0"])[0])) / 1000)
    RUNS[event_id] = RUNS.get(event_id, 0) + 1
    if RUNS[event_id] <= int(query.get("fail_runs", ["0"])[0]):
        raise RuntimeError("the mail server does not answer")


class Webhook(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        expected = "sha256=" + hmac.new(SECRET, body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, self.headers.get("X-Hub-Signature-256", "")):
            return self.answer(401)

        # Has this event been processed?
        event_id = self.headers["X-GitHub-Delivery"]
        with connect() as db:
            row = db.execute("SELECT 1 FROM processed_events WHERE id = ?", (event_id,)).fetchone()
        if row:
            return self.answer(200)

        try:
            json.loads(body)
            work(event_id, parse_qs(urlsplit(self.path).query))
        except Exception:
            return self.answer(500)

        with connect() as db:
            db.execute("INSERT INTO processed_events (id) VALUES (?)", (event_id,))
        self.answer(200)

    def do_GET(self):
        with connect() as db:
            rows = db.execute("SELECT id, count(*) FROM effects GROUP BY id").fetchall()
        self.answer(200, json.dumps([{"id": row[0], "count": row[1]} for row in rows]))

    def answer(self, status, text=""):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


parser = argparse.ArgumentParser()
parser.add_argument("--listen", default="127.0.0.1:3000")
parser.add_argument("--database", default="events.db")
options = parser.parse_args()
DATABASE = options.database
with connect() as db:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE IF NOT EXISTS processed_events (id TEXT PRIMARY KEY)")
    db.execute("CREATE TABLE IF NOT EXISTS effects (id TEXT)")
host, port = options.listen.split(":")
server = ThreadingHTTPServer((host, int(port)), Webhook)
print(f"listening on http://{host}:{server.server_address[1]}", flush=True)
server.serve_forever()
