"""Names of what lies at an output, each said once."""

from __future__ import annotations

RECEIPT = "receipt.json"
CACHE = "_cache"
STAGING = "_staging"
QUARANTINE = "_quarantine"

FILES = f"{CACHE}/files"

RUNNING = "_running"

VERSIONS = "versions"
ORIGINS = "origins"
PINS = "pins"

RUNS = "runs"

GROUPS = "_groups"
