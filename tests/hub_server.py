"""
A hub in one file: what huggingface_hub's client asks for when a repository is made, filled, listed and downloaded.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class Hub(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = {}  # id -> revision -> path -> bytes
        self.requests = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, repo_id, revision="main"):
        """The files of a revision, or None; a commit's hash names the branch that it is the head of."""
        branches = self.repos.get(repo_id, {})
        for name, files in branches.items():
            if revision in (name, commit_hash(files)):
                return files
        return None


def commit_hash(files):
    digest = hashlib.sha1()
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + files[path])
    return digest.hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", headers=None):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": len(body),
            **(headers or {}),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code):
        self.answer(404, {"error": code}, {"X-Error-Code": code})

    def parts(self):
        path = unquote(urlparse(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Authorization")))
        return path.strip("/").split("/")

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.parts()
        if parts == ["api", "whoami-v2"]:
            return self.answer(200, {"name": "user", "type": "user", "orgs": []})
        if parts[:2] == ["api", "models"]:
            repo_id, rest = "/".join(parts[2:4]), parts[4:]
            if repo_id not in self.server.repos:
                return self.missing("RepoNotFound")
            revision = rest[1] if len(rest) > 1 else "main"
            files = self.server.files(repo_id, revision)
            if files is None:
                return self.missing("RevisionNotFound")
            if rest[:1] == ["tree"]:
                entries = [{"type": "file", "path": p, "size": len(c), "oid": blob_hash(c)} for p, c in files.items()]
                return self.answer(200, entries)
            siblings = [{"rfilename": path} for path in files]
            info = {
                "_id": "0",
                "id": repo_id,
                "sha": commit_hash(files),
                "siblings": siblings,
                "private": False,
                "tags": [],
            }
            return self.answer(200, info)
        if len(parts) > 4 and parts[2] == "resolve":
            repo_id, revision, path = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
            if repo_id not in self.server.repos:
                return self.missing("RepoNotFound")
            files = self.server.files(repo_id, revision)
            if files is None:
                return self.missing("RevisionNotFound")
            if path not in files:
                return self.missing("EntryNotFound")
            headers = {"ETag": f'"{blob_hash(files[path])}"', "X-Repo-Commit": commit_hash(files)}
            return self.answer(200, files[path], {**headers, "Content-Type": "application/octet-stream"})
        return self.missing("EntryNotFound")

    def do_POST(self):
        parts = self.parts()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if parts == ["api", "repos", "create"]:
            request = json.loads(body)
            repo_id = f"{request.get('organization') or 'user'}/{request['name']}"
            if repo_id in self.server.repos:
                return self.answer(409, {"error": "exists", "url": f"{self.server.url}/{repo_id}"})
            self.server.repos[repo_id] = {"main": {}}
            return self.answer(200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id})
        if parts == ["api", "validate-yaml"]:
            return self.answer(200, {"errors": [], "warnings": []})
        repo_id, action, revision = "/".join(parts[2:4]), parts[4], parts[5]
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            return self.answer(200, {"files": modes})
        if action == "commit":
            files = dict(self.server.repos[repo_id].get(revision, {}))
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                if entry["key"] == "deletedFile":
                    del files[entry["value"]["path"]]
            self.server.repos[repo_id][revision] = files
            oid = commit_hash(files)
            url = f"{self.server.url}/{repo_id}/commit/{oid}"
            return self.answer(200, {"success": True, "commitUrl": url, "commitOid": oid, "hookOutput": ""})
        return self.missing("EntryNotFound")


def run_with_hub(code, hub, folder, home="home"):
    """What a fresh process that runs `code` in `folder`, and knows no other hub than this one, prints."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / home),
        "HF_TOKEN": "hf_local",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def blob_hash(content):
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running_hub():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
