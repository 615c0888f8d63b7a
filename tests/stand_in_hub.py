"""A small Hugging Face hub on loopback: as much of its HTTP interface as ``huggingface_hub`` and ``datasets`` use to read, and
``huggingface_hub`` to write.

A test module that imports ``stand_in_hub_fixture`` has the fixture ``stand_in_hub``; another process is pointed to a hub by
``environment``.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import requests

from tests.processes import serving

Kind = Literal["datasets", "models"]
API = re.compile(r"/api/(?P<kind>datasets|models)/(?P<repo>[^/]+/[^/]+)(?:/(?P<verb>revision|tree|paths-info)/(?P<rest>.+))?")
WRITE = re.compile(r"/api/datasets/(?P<repo>[^/]+/[^/]+)/(?P<verb>preupload|commit|tag)/(?P<revision>[^/]+)")
BATCH = re.compile(r"/datasets/[^/]+/[^/]+\.git/info/lfs/objects/batch")
BUCKET = re.compile(r"/(?:api/)?buckets/(?P<bucket>[^/]+/[^/]+)(?:/(?P<verb>[a-z-]+)(?:/(?P<rest>.+))?)?")
LARGE = 1000
"""Files of so many bytes lie in the store for large files."""
RESOLVE = re.compile(r"/(?:(?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Fault:
    """What the next *times* requests to paths with *part* in them are answered with."""

    part: str
    status: int
    times: int
    headers: Mapping[str, str]


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class StandInHub:
    """A hub; ``requests`` is every (method, path) so far, in order."""

    url: str = ""
    commits: dict[tuple[str, str, str], dict[str, bytes]] = field(default_factory=dict)
    """Files by their paths of (datasets or models, repository, commit)."""
    refs: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    """Commits by the branches and tags of (datasets or models, repository)."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    token: str = ""
    """Who writes must have it."""
    large: dict[str, bytes] = field(default_factory=dict)
    """Content of the store for large files, by sha256."""
    made: dict[str, str] = field(default_factory=dict)
    """For whom repositories were made, by name."""
    buckets: dict[str, dict[str, tuple[str, bytes]]] = field(default_factory=dict)
    """Files of buckets by their paths: digest and content."""
    xet: dict[str, bytes] = field(default_factory=dict)
    """Content by its digest in the store of chunks."""
    messages: list[str] = field(default_factory=list)
    """Of commits, in order."""
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, repo: str, files: Mapping[str, bytes | str], kind: Kind = "datasets", branch: str = "main") -> str:
        """Make *files* (path -> content) the whole content of a repository's branch; the commit."""
        contents = {path: of.encode() if isinstance(of, str) else of for path, of in sorted(files.items())}
        digest = hashlib.sha1(repr((kind, repo, contents)).encode()).hexdigest()
        self.commits[kind, repo, digest] = contents
        self.refs.setdefault((kind, repo), {})[branch] = digest
        return digest

    def fail(self, part: str, status: int, times: int = 1, **headers: str) -> None:
        """Answer the next *times* requests to a path that contains *part* with *status*; ``Retry_After="0"`` is a header."""
        with self.lock:
            self.faults.append(Fault(part, status, times, {name.replace("_", "-"): value for name, value in headers.items()}))

    def count(self, part: str, method: str = "") -> int:
        """Requests so far to paths that contain *part*, failed ones included."""
        with self.lock:
            return sum(part in path and method in ("", asked) for asked, path in self.requests)

    def answer(self, method: str, target: str, body: bytes, token: str = "") -> Answer:
        """What the hub says to a request; *target* is path and query as they were sent."""
        parts = urlsplit(target)
        path = unquote(parts.path)
        with self.lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.times and fault.part in path:
                    fault.times -= 1
                    return Answer(fault.status, b"stand-in fault", fault.headers)
        if method == "PUT" and (match := re.fullmatch(r"/(large|xet)/(\w+)", path)):
            getattr(self, match[1])[match[2]] = body
            return Answer(200)
        if match := BUCKET.fullmatch(path):
            recursive = "recursive=true" in parts.query.lower()
            return self._bucket(method, match["bucket"], match["verb"], match["rest"] or "", body, token, recursive)
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/refs", path):
            return self._refs(match[1])
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if path == "/api/repos/create" or WRITE.fullmatch(parts.path) or BATCH.fullmatch(path):
            return self._write(parts.path, body) if token == self.token else _json({"error": "not you"}, 403)
        # Revisions such as refs%2Fpr%2F1 are one part of the path: what is matched is still quoted.
        if match := API.fullmatch(parts.path):
            return self._api(**match.groupdict(), query=parse_qs(parts.query), form=parse_qs(body.decode()))
        if match := RESOLVE.fullmatch(parts.path):
            kind, repo, revision, name = match.group("kind") or "models", *map(unquote, match.group("repo", "revision", "path"))
            return self._file(kind, repo, revision, name)
        return _missing("EntryNotFound")

    def _bucket(self, method: str, bucket: str, verb: str | None, rest: str, body: bytes, token: str, recursive: bool) -> Answer:
        if method == "POST" and verb != "paths-info":
            if token != self.token:
                return _json({"error": "not you"}, 403)
            files = self.buckets.setdefault(bucket, {})
            if verb is None:
                return _json({"url": f"{self.url}/buckets/{bucket}"})
            files |= {line["path"]: (line["xetHash"], self.xet[line["xetHash"]]) for line in map(json.loads, body.splitlines())}
            return _json({"failed": []})
        if bucket not in self.buckets:
            return _missing("RepoNotFound")
        files = self.buckets[bucket]
        told = {
            path: {"type": "file", "path": path, "size": len(content), "xetHash": digest}
            for path, (digest, content) in files.items()
        }
        match verb:
            case None:
                return _json(
                    {"id": bucket, "private": False, "createdAt": "2026-01-01T00:00:00.000Z", "size": 0, "totalFiles": 0}
                )
            case "tree":
                found = self._tree(told, rest, recursive)
                return found if found.status == 200 else _json([])
            case "paths-info":
                return _json([told[path] for path in json.loads(body)["paths"] if path in told])
        return Answer(200, files[rest][1], {"Accept-Ranges": "bytes"}) if rest in files else _missing("EntryNotFound")

    def _write(self, path: str, body: bytes) -> Answer:
        if match := WRITE.fullmatch(path):
            repo, revision = match["repo"], unquote(match["revision"])
            if match["verb"] == "commit":
                return self._commit(repo, revision, map(json.loads, body.splitlines()))
            if match["verb"] == "tag":
                self.refs["datasets", repo][json.loads(body)["tag"]] = revision
                return Answer(201)
            files = [
                {"path": one["path"], "uploadMode": "lfs" if one["size"] >= LARGE else "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return _json({"files": files})
        told = json.loads(body)
        if "objects" in told:
            missing = [one["oid"] for one in told["objects"] if one["oid"] not in self.large]
            hrefs = {oid: {"actions": {"upload": {"href": f"{self.url}/large/{oid}"}}} for oid in missing}
            return _json({"transfer": "basic", "objects": [{**one, **hrefs.get(one["oid"], {})} for one in told["objects"]]})
        repo = f"{told['organization']}/{told['name']}"
        answer = {"url": f"{self.url}/datasets/{repo}"}
        if ("datasets", repo) in self.refs:
            return _json(answer, 409)
        self.commit(repo, {})
        self.made[repo] = str(told.get("visibility"))
        return _json(answer)

    def _commit(self, repo: str, branch: str, lines: Iterable[dict[str, Any]]) -> Answer:
        now = self._find("datasets", repo, branch)
        assert isinstance(now, str)
        content = dict(self.commits["datasets", repo, now])
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.messages.append(value["summary"])
                case "file":
                    content[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    content[value["path"]] = self.large[value["oid"]]
                case "deletedFile":
                    del content[value["path"]]
        oid = self.commit(repo, content, branch=branch)
        return _json({"commitUrl": f"{self.url}/datasets/{repo}/commit/{oid}", "commitOid": oid})

    def _refs(self, repo: str) -> Answer:
        refs = sorted(self.refs["datasets", repo].items())
        told = [{"name": name, "ref": f"refs/{name}", "targetCommit": commit} for name, commit in refs]
        branches = [one for one in told if one["name"] == "main"]
        return _json({"branches": branches, "converts": [], "tags": [one for one in told if one["name"] != "main"]})

    def _api(
        self, kind: str, repo: str, verb: str | None, rest: str | None, query: dict[str, list[str]], form: dict[str, list[str]]
    ) -> Answer:
        revision, _, directory = (rest or "main").partition("/")
        commit = self._find(kind, repo, unquote(revision))
        if isinstance(commit, Answer):
            return commit
        files = self.commits[kind, repo, commit]
        if verb == "tree":
            told = {path: _entry(path, content) for path, content in files.items()}
            return self._tree(told, unquote(directory), query.get("recursive", ["false"])[0].lower() == "true")
        if verb == "paths-info":
            return _json([_entry(path, files[path]) for path in form.get("paths", []) if path in files])
        siblings = [{"rfilename": path} for path in files]
        gated = "manual" if repo in self.gated else False
        return _json({"_id": commit[:24], "id": repo, "sha": commit, "private": False, "gated": gated, "siblings": siblings})

    def _tree(self, files: dict[str, dict[str, Any]], directory: str, recursive: bool) -> Answer:
        prefix = f"{directory}/" if directory else ""
        entries = {}
        for path, entry in files.items():
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folder = prefix + "/".join(parts[:depth])
                entries[folder] = {
                    "type": "directory",
                    "oid": hashlib.sha1(folder.encode()).hexdigest(),
                    "size": 0,
                    "path": folder,
                }
            if recursive or len(parts) == 1:
                entries[path] = entry
        return _json(list(entries.values())) if entries or not directory else _missing("EntryNotFound")

    def _file(self, kind: str, repo: str, revision: str, path: str) -> Answer:
        commit = self._find(kind, repo, revision)
        if isinstance(commit, Answer):
            return commit
        if repo in self.gated:
            return Answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {repo} is restricted."})
        content = self.commits[kind, repo, commit].get(path)
        if content is None:
            return _missing("EntryNotFound", {"X-Repo-Commit": commit})
        return Answer(200, content, {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"', "Accept-Ranges": "bytes"})

    def _find(self, kind: str, repo: str, revision: str) -> str | Answer:
        """The commit of a revision, or the answer that there is none."""
        if (kind, repo) not in self.refs:
            return _missing("RepoNotFound")
        if (kind, repo, revision) in self.commits:
            return revision
        return self.refs[kind, repo].get(revision) or _missing("RevisionNotFound")


def _missing(code: str, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(404, json.dumps({"error": code}).encode(), {"X-Error-Code": code, **(headers or {})})


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _oid(content: bytes) -> str:
    """The object id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it: Parquet files and large ones lie in a store that tells their digests."""
    entry = {"type": "file", "oid": _oid(content), "size": len(content), "path": path}
    large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return {**entry, "lfs": large} if path.endswith(".parquet") or len(content) >= LARGE else entry


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.0, so that no connection outlives its request."""

    hub: StandInHub

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.hub.answer(self.command, self.path, body, (self.headers.get("Authorization") or "").removeprefix("Bearer "))
        status, content, headers = answer.status, answer.body, dict(answer.headers)
        if status == 200 and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")):
            start, stop = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
            status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{len(content)}"
            content = content[start:stop]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # a reader may stop when it has seen enough
                self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = _respond  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what was asked is in ``StandInHub.requests``."""


@contextmanager
def serve() -> Iterator[StandInHub]:
    """A hub for as long as the block runs."""
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = False  # closing the server waits for its last answers
    with serving(server) as hub.url:
        yield hub


def environment(url: str, home: Path) -> dict[str, str]:
    """Variables that point another process to the hub at *url*, all that it keeps below *home*."""
    return {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "HF_XET_CACHE": str(home / "xet"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    }


def isolate(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """Point this process to the hub at *url*: the libraries read their environment once, so that what they read is set too."""
    import datasets.config
    import hf_xet
    from huggingface_hub import HfApi, constants
    from huggingface_hub._buckets import _BucketAddFile

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(url, home).items():
        monkeypatch.setenv(name, value)
    in_huggingface_hub = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_XET_CACHE": str(home / "xet"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "AGENT_HARNESSES_PATH": str(home / "harnesses.json"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DISABLE_XET": True,
    }
    in_datasets = {
        "HF_ENDPOINT": url,
        "HF_CACHE_HOME": str(home),
        "HF_DATASETS_CACHE": home / "datasets",
        "DOWNLOADED_DATASETS_PATH": home / "datasets/downloads",
        "EXTRACTED_DATASETS_PATH": home / "datasets/extracted",
        "HF_HUB_OFFLINE": False,
        "HF_UPDATE_DOWNLOAD_COUNTS": False,
    }
    for module, values in ((constants, in_huggingface_hub), (datasets.config, in_datasets)):
        for name, fixed in values.items():
            monkeypatch.setattr(module, name, fixed)
    write = HfApi._batch_bucket_files

    def write_without_chunks(api: HfApi, bucket: str, *, add: list[tuple[Any, str]], **_: Any) -> None:
        """What the client's store of chunks would get goes to the hub as it is, by the same digest."""
        files = []
        for source, name in add:
            home.mkdir(parents=True, exist_ok=True)
            content = source if isinstance(source, bytes) else Path(source).read_bytes()
            (home / "content").write_bytes(content)
            files.append(_BucketAddFile(source, name, xet_hash=hf_xet.hash_files([str(home / "content")])[0].hash))
            requests.put(f"{url}/xet/{files[-1].xet_hash}", content, timeout=10).raise_for_status()
        write(api, bucket, add=files)

    monkeypatch.setattr(HfApi, "_batch_bucket_files", write_without_chunks)


@pytest.fixture(name="stand_in_hub")
def stand_in_hub_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """An empty hub of the test's own; this process asks it, and keeps what it gives below the test's directory."""
    from huggingface_hub import HfFileSystem, close_session

    with serve() as hub:
        isolate(monkeypatch, hub.url, tmp_path / "huggingface")
        try:
            yield hub
        finally:
            close_session()
            HfFileSystem.clear_instance_cache()
