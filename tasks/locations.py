"""Locations: paths and URLs from outside, checked once, by one type; and requests of them, checked at every hop.

A location is stored as people wrote it. It is refused if two programs could read it in two ways: so the place that was checked
is the one that is opened.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from typing import Annotated, Any, cast
from urllib.parse import quote, unquote, unquote_to_bytes, urlsplit

import fsspec
from pydantic import AfterValidator, BeforeValidator, Field

from flat_tokens.stores.answers import SlowError
from flat_tokens.stores.local import real_path
from flat_tokens.stores.reading import INPUT_ROOTS, OUTPUT_ROOTS, named_roots
from flat_tokens.stores.store import AZURE, REMOTE, azure_setting

OF_CREDENTIALS = [
    ipaddress.ip_network(named) for named in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::/32", "fd20:ce::/32")
]
"""Where cloud machines get their credentials, besides link-local addresses."""
RUN = "PREFECT__FLOW_RUN_ID"
"""Environment variable of the process of a run that Prefect's API was asked for."""
LOCAL = ("file", "local")
SCHEMES = (*LOCAL, *REMOTE)
WEB = {"http": 80, "https": 443}
SAME_STORE = {"gcs": "gs", "s3a": "s3", "az": "abfs", "abfss": "abfs"}
HARMLESS = "alt|date|dl|download|file|format|lang|limit|name|offset|page|part|path|raw|ref|revision|type|version|versionId"
"""Parameters that URLs may have. Any other one may be a secret."""
_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*:"
CONTAINER = r"[a-z0-9$-]+@[a-z0-9]+\.(?:blob|dfs)\.core\.windows\.net(?=/|$)"
_USER = rf"(?:(?!hf://|(?:az|abfss?)://{CONTAINER}){_SCHEME}[/\\]*[^/\\?#]*@|{_SCHEME}[\s\S]*:[/\\]+[^/\\?#]*@|hf://[^/]*:[^/]*@)"
_PARAMETER = rf"{_SCHEME}[\s\S]*(?:[?&;#]|%3[FBfb]|%2[36])(?!(?:{HARMLESS})=)[^=&;#/?]*="
_QUERY = rf"[Hh][Tt][Tt][Pp][Ss]?:[\s\S]*(?:#|\?(?!(?:{HARMLESS})=)|\?[\s\S]*[&;](?!(?:{HARMLESS})=))"
"""A query or a fragment of any form. A name in the path may have an encoded '?' or '#', which begins neither."""
WITHOUT_SECRETS = rf"^(?!\s*{_USER})(?!\s*{_PARAMETER})(?!\s*{_QUERY})"
"""For JSON schemas: Prefect's server refuses secrets by it before it stores a run."""
_UP = re.compile(r"(^|[/\\])\.\.?(;[^/\\]*)?([/\\]|$)")
_SERVER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?!0*$)\d{1,5})?")
_HUB_REVISION = re.compile(
    r"^((?:(?:datasets|spaces)/|(?!datasets/|spaces/|buckets/))[^/@]+/[^/@]+)@(?:refs/(?:convert|pr)/[^/]+|[^/]*)"
)


def plain_location(location: str) -> str:
    """Refuse a location that must not are in a run's parameters, or cannot be one. Secrets are not repeated."""
    # A secret may stand anywhere: only a host that ends as a host does is shown, and only a name that is made of letters.
    host = re.match(rf"\s*{_SCHEME}//(?:[^/?#\\]*@)?({_SERVER.pattern})(?=[/?#]|$)", location)
    named, ambient = f"the URL of {host[1]}" if host else "a location", "ambient credentials (environment, instance role)"
    if any(re.match(rf"\s*{_USER}", text) for text in _decoded(location)):
        raise ValueError(f"{named} carries credentials. Parameters are shown in plain text: use {ambient} instead.")
    if re.match(rf"\s*{_QUERY}", location) or any(re.match(rf"\s*{_PARAMETER}", text) for text in _decoded(location)):
        name, *_ = re.findall(rf"[?&;#](?!(?:{HARMLESS})=)([A-Za-z_-]{{2,24}})=[^=&;#]", location) or ["more than a path"]
        raise ValueError(f"{named} is signed ({name}). Use ambient credentials instead. Known as harmless: {HARMLESS}")
    scheme, separator, rest = location.partition("://")
    if not location.strip() or "\0" in location or (separator and not rest):
        raise ValueError(f"{location!r} is not a path or URL")
    if "::" in re.sub(r"//\[[0-9A-Fa-f:.]+\]", "//", location, count=1):
        raise ValueError("chained URLs ('::') are not accepted; name the file itself")
    if separator and scheme not in SCHEMES:
        raise ValueError(f"{scheme}:// is not known here; {', '.join(SCHEMES)} are")
    if separator and scheme not in LOCAL:
        return _plain_url(location, scheme, rest)
    path = rest or location
    if (start := re.match(_SCHEME, path)) and start[0][:-1].lower() in SCHEMES:
        raise ValueError(f"{start[0]} begins no path, and a URL begins with one {start[0].lower()}//")
    if re.search(r"(^|/)(?!\.{1,2}/)[^/]+/\.\.(/|$)", path):
        raise ValueError(f"{location} goes down and up again ('..'); write where it leads")
    return location


def _decoded(text: str) -> Iterator[str]:
    """The text and its percent-decodings, one after another."""
    yield text
    while (further := unquote(text)) != text:
        yield (text := further)


def _plain_url(location: str, scheme: str, rest: str) -> str:
    """Return a URL, unless two programs could read it in two ways: ValueError."""
    host = re.split(r"[/?#]", rest)[0]
    if scheme not in ("hf", "memory") and not host:
        raise ValueError(f"{location} names no {'server' if scheme in WEB else 'bucket'}")
    if scheme in WEB and not _SERVER.fullmatch(host):
        raise ValueError(f"{scheme}:// is not followed by a server: a name or an address in ASCII, and perhaps a port")
    if scheme in AZURE and not re.fullmatch(rf"{CONTAINER}|[a-z0-9$-]+", host):
        raise ValueError(
            f"{scheme}:// is not followed by a container, perhaps with its account. Write az://CONTAINER/PATH or "
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH."
        )
    if re.search(r"[\x00-\x1f\x7f]|^\s|\s$", location) or (scheme not in WEB and "://" in rest):
        raise ValueError(f"{location!r} is not one URL. Write it without line breaks, spaces around it, or a second scheme.")
    if _goes_up(location):
        raise ValueError(f"{location} goes up ('..', also encoded) or nowhere ('.'); write where it leads")
    return location


def _goes_up(url: str) -> bool:
    path = re.split(r"[?#]", url)[0] if url.startswith("http") else url
    return any(_UP.search(text) for text in _decoded(path))


ANSWER_SECONDS = 120.0
"""A server whose answer has not begun by then, headers and all, is given up."""
CHECK_ACCESS = "Check the address, the network, and the credentials in the environment."
CREDENTIALS = "FLAT_TOKENS_CREDENTIALS"
"""Environment variable of the workers: the name of a Secret block of Prefect's, such as secret/buckets (flows/credentials.py)."""


def unbound() -> str | None:
    """A warning for people if the operator has bound reads or writes to no roots."""
    missing = " and ".join(name for name in (INPUT_ROOTS, OUTPUT_ROOTS) if not os.environ.get(name))
    return f"{missing} not set: whoever starts runs has them read or write all that this worker can" if missing else None


def readable(location: str) -> str:
    """Refuse a location outside of the roots for input, if the operator has set any, and addresses of cloud machines'
    credentials that no root names.
    """
    _check_within(location, "read", INPUT_ROOTS, OUTPUT_ROOTS)
    if location.startswith(("http://", "https://")):
        check_hop(location, location)
    return location


def readable_directory(path: str) -> str:
    """The real path of a local directory, with a slash at its end. Its plain files need no further check. ValueError if it may
    not be read.
    """
    return readable(real_path(path or ".").rstrip("/") + "/")


def writable(location: str) -> str:
    """Refuse a location that cannot be written, that would become a directory with an unintended name, or that is outside of
    the roots for output, if the operator has set any.
    """
    if location.startswith(("http://", "https://")):
        raise ValueError("nothing can be written to http; name a directory or an object store, such as gs://bucket/path")
    if meant := other_meaning(location):
        raise ValueError(f"{location} {meant}")
    return _check_within(location, "written", OUTPUT_ROOTS)


_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\}?)|%[A-Za-z_]\w*%")
_EXPRESSION = re.compile(r"\$\([^)]*\)?|`[^`]*`?|\{\{.*?(?:\}\}|$)")
_WINDOWS = re.compile(r"[A-Za-z]:(?:[\\/]|$)|.*\\")


def other_meaning(location: str) -> str:
    """The path that a local path was probably meant to be, if it would not lead there, as the end of a sentence, with the
    remedy; empty for other locations.
    """
    if (path := local_path(location)) is None:
        return ""
    if variable := _VARIABLE.search(path):
        return f"has a variable, {variable[0]}, which only a shell replaces. Write what it stands for; ~ is the home directory."
    if expression := _EXPRESSION.search(path):
        return f"has {expression[0]}, which nothing here replaces. Write what it stands for."
    if _WINDOWS.match(path):
        return "is a path of Windows. Write it as it is called here, with slashes, such as /mnt/c/data."
    if path.startswith("~"):
        return (
            f"begins in the home directory of {path.partition('/')[0][1:]!r}, whom this machine does not know. Write where it is."
        )
    return ""


def absolute(location: str) -> str:
    """A local path as it is called from any directory and by any user; other locations as they are."""
    if (path := local_path(location)) is None:
        return location
    scheme, separator, _ = location.rpartition("://")
    return f"{scheme}{separator}{os.path.abspath(path)}"


def _check_within(location: str, verb: str, *variables: str) -> str:
    if not (roots := named_roots(*variables)) or is_within(location, roots):
        return location
    allowed = f"{variables[0]} allows {', '.join(roots)}"
    raise ValueError(f"{location} may not be {verb} here: {allowed}. Ask who runs the workers for more.")


def is_within(location: str, roots: Sequence[str]) -> bool:
    """Whether a location is within one of several roots."""
    store, path = place_of(location)
    if store and (_goes_up(location) or "::" in location.partition("://")[2].partition("/")[2]):
        return False  # programs differ in where that leads
    return any(root[0] == store and f"{path}/".startswith(f"{root[1].rstrip('/')}/") for root in map(place_of, roots))


def _path(value: Any) -> Any:
    return plain_location(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


def _decoded_path(value: Any) -> Any:
    is_encoded = isinstance(value, str) and value.startswith("file://") and "%" in value
    return unquote(value.removeprefix("file://")) if is_encoded else value


DECODED = BeforeValidator(_decoded_path)
"""Annotation of an input: a file:// URL with percent-encoding becomes the path that it stands for."""
Unsigned = Annotated[str, Field(json_schema_extra={"pattern": WITHOUT_SECRETS})]
"""A parameter that may name a place among other things."""
Location = Annotated[Unsigned, BeforeValidator(_path), DECODED, AfterValidator(readable)]
Output = Annotated[Unsigned, BeforeValidator(_path), AfterValidator(writable)]


def local_path(location: str) -> str | None:
    """The path of a location on this machine; None if it is elsewhere."""
    scheme, separator, rest = location.partition("://")
    if separator and scheme not in LOCAL:
        return None
    return os.path.expanduser(rest if separator else location)


def place_of(location: str) -> tuple[str, str]:
    """The store of a location - its scheme, and a server's name and port - and its path there. Links of a local one are
    resolved; the path on a server has one spelling; a revision is not a part of a path on the hub.
    """
    if (path := local_path(location)) is not None:
        return "", real_path(path)
    scheme, _, rest = location.partition("://")
    if scheme in WEB:
        parts = urlsplit(location)
        spelled = (quote(unquote_to_bytes(part), safe="") for part in parts.path.rstrip("/").split("/"))
        return f"{scheme}://{parts.hostname}:{parts.port or WEB[scheme]}", "/".join(spelled)
    rest = _HUB_REVISION.sub(r"\1", rest) if scheme == "hf" else rest
    if scheme in AZURE:  # a container of the account that the environment names need not name it
        rest = re.sub(rf"^([^/]*)@{azure_setting('account_name')}\.[^/]*", r"\1", rest)
    return SAME_STORE.get(scheme, scheme), "/" + (rest.strip("/") if scheme == "memory" else rest.rstrip("/"))


def check_hop(began: str, url: str, address: str = "") -> None:
    """Refuse a request of *url*, to which one of *began* was led, perhaps by way of others. *address*: the server's, once it is
    known. Within the roots all may be asked; what began at the hub may lead to its other pages and to public servers by https,
    as the hub's own files do. Without roots, all but addresses of credentials, and for a run that came through Prefect's API
    public ones alone.
    """
    parts, roots = urlsplit(url), named_roots(INPUT_ROOTS, OUTPUT_ROOTS)
    if parts.scheme in WEB and roots and is_within(url, roots):
        return
    hub = _origin(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    of_hub, numbers = _origin(began) == hub, _numbers(address or parts.hostname or "")
    if of_hub and _origin(url) == hub:
        return
    is_public = all(number.is_global for number in numbers)
    message = f"{began} leads to {parts.scheme}://{parts.hostname}{f' ({address})' if address else ''}"
    if parts.scheme not in WEB or (roots and not (of_hub and is_public and parts.scheme == "https")):
        raise ValueError(f"{message}, which may not be read here: {INPUT_ROOTS} allows {', '.join(roots) or 'http and https'}")
    if any(number.is_link_local or any(number in network for network in OF_CREDENTIALS) for number in numbers):
        raise ValueError(f"{message}, an address at which cloud machines get their credentials. No root names it.")
    if not is_public and RUN in os.environ:
        raise ValueError(f"{message}, a private address, which a run of Prefect may not read unless {INPUT_ROOTS} names it.")


def _origin(url: str) -> str:
    return place_of(url)[0] if url.startswith(("http://", "https://")) else ""


def _numbers(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The address that a host's name spells in any notation, and the IPv4 addresses within an IPv6 one."""
    with suppress(OSError, ValueError):
        return [ipaddress.IPv4Address(socket.inet_aton(host.rstrip(".")))]
    with suppress(ValueError):
        number = ipaddress.IPv6Address(host.strip("[]").partition("%")[0])
        value, low = int(number), ipaddress.IPv4Address(int(number) & 0xFFFFFFFF)
        if value >> 32 in (0, 0xFFFF, 0xFFFF << 16):  # compatible, mapped, translated
            return [low]
        inner = [number.sixtofour, *(number.teredo or ())]
        if value >> 32 == 0x64FF9B << 64 or value >> 32 & 0xFDFFFFFF == 0x5EFE:  # by way of a translator or a tunnel
            inner.append(low)
        if value >> 80 == 0x64FF9B0001:  # a translator of one's own: at the end, or around the eight bits after 64
            inner += [low, ipaddress.IPv4Address(value >> 48 & 0xFFFF0000 | value >> 40 & 0xFFFF)]
        return [number, *(one for one in inner if one is not None)]
    return []


def checked_session(began: str) -> Any:
    """A session of ``requests`` for one request, of which each hop is checked. With a proxy, which looks names up by itself,
    only its URL is.
    """
    import requests  # takes a while

    class Adapter(requests.adapters.HTTPAdapter):
        def get_connection_with_tls_context(self, request: Any, *arguments: Any, **options: Any) -> Any:
            check_hop(began, request.url)
            pool: Any = super().get_connection_with_tls_context(request, *arguments, **options)
            if pool.proxy is None:
                # A pool is used again where a server leads to another path of its own: it has a checked class then.
                plain = type(pool).ConnectionCls
                pool.ConnectionCls = type("Checked", (_Peer, plain), {"asked": (began, request.url)})
            return pool

        def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
            response: Any = super().send(request, *arguments, **options)
            if response.is_redirect:  # its session would read all of what comes with it
                response.raw.close()
                response._content, response._content_consumed = b"", True
            return response

    session = requests.Session()
    for scheme in WEB:
        session.mount(f"{scheme}://", Adapter())
    return session


class _Peer:
    """A connection of ``requests`` that is given up, before it is used, if the server may not be asked, and if the beginning of
    its answer takes too long.
    """

    asked, is_late, sock = ("", ""), False, None

    def _new_conn(self) -> Any:
        connected: Any = super()._new_conn()  # type: ignore[misc]
        with ExitStack() as held:
            held.callback(connected.close)
            check_hop(*self.asked, connected.getpeername()[0])
            held.pop_all()
        return connected

    def getresponse(self, *arguments: Any, **options: Any) -> Any:
        late = threading.Timer(ANSWER_SECONDS, self._give_up)
        late.start()
        try:
            return super().getresponse(*arguments, **options)  # type: ignore[misc]
        finally:
            late.cancel()
            if self.is_late:
                raise SlowError(f"the server's answer had not begun after {ANSWER_SECONDS:.0f} s")

    def _give_up(self) -> None:
        self.is_late = True
        with suppress(OSError, AttributeError):  # it has ended
            cast(socket.socket, self.sock).shutdown(socket.SHUT_RDWR)


_began: ContextVar[str] = ContextVar("_began")


async def checked_client(**options: Any) -> Any:
    """The client of fsspec's stores at http: each hop is checked, and headers of ours go to the first server alone."""
    import aiohttp  # takes a while

    async def begin(session: Any, context: Any, request: Any) -> None:
        _began.set(str(request.url))

    class Connector(aiohttp.TCPConnector):
        async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
            began, url = _began.get(), str(req.url)
            check_hop(began, url)
            for name in () if _origin(url) == _origin(began) else ("Authorization", "Cookie", *(options.get("headers") or ())):
                req.headers.popall(name, None)
            connection: Any = await super().connect(req, traces, timeout)
            with ExitStack() as held:
                held.callback(connection.close)
                if req.proxy is None:
                    check_hop(began, url, connection.transport.get_extra_info("peername")[0])
                held.pop_all()
            return connection

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begin)
    return aiohttp.ClientSession(connector=Connector(), trace_configs=[trace], **options)


for _scheme in WEB:
    fsspec.config.conf.setdefault(_scheme, {}).setdefault("get_client", checked_client)
