"""Keys that sign, for tests: ed25519, in PEM."""

import base64
from pathlib import Path

from flat_tokens.stores import signing


def pem(secret: str) -> bytes:
    """The private key of 32 bytes, given as digits, as RFC 8410 writes it."""
    der = bytes.fromhex("302e020100300506032b657004220420" + secret)
    return b"-----BEGIN PRIVATE KEY-----\n%b\n-----END PRIVATE KEY-----\n" % base64.b64encode(der)


def public_pem(private: bytes) -> bytes:
    der = bytes.fromhex("302a300506032b6570032100") + signing.keys_of(private).public[0].public_bytes_raw()
    return b"-----BEGIN PUBLIC KEY-----\n%b\n-----END PUBLIC KEY-----\n" % base64.b64encode(der)


KEY, OTHER = pem("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"), pem("5a" * 32)
"""The first is that of RFC 8032, 7.1, test 1."""


def key_file(path: Path, text: bytes = KEY) -> Path:
    path.write_bytes(text)
    path.chmod(0o600)
    return path
