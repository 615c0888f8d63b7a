"""Arguments of serve.py and register.py, and the work pools. Prefect is not imported: serve.py chooses its settings first."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from pathlib import Path

from flat_tokens.tools.cli import add_listed

POOLS = {"builds": "flat-tokens", "groups": "flat-tokens-groups"}
"""Worker -> its pool."""


ARGUMENTS = """
datasets=DATASET.yaml...?  refreshed by a deployment of its own
| --cron CRON  when; without it, only when asked to in the UI or by 'prefect deployment run'
| --every SECONDS  how often, instead of --cron
--timezone TIMEZONE  of --cron, such as Europe/Paris (default: UTC)
--only  take other datasets off: their deployments go, their outputs and runs stay
--keep N  versions of each dataset that are kept (all)
--credentials secret/NAME  a block with credentials of stores (flows/credentials.py)
--notify TYPE/NAME  a notification block that hears of failures, such as slack-webhook/alerts
"""


def arguments(description: str) -> ArgumentParser:
    """The arguments of serve.py and register.py: the deployments to register."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    kinds = {"every": _positive, "keep": _positive, "credentials": _block, "notify": _block}
    add_listed(parser, ARGUMENTS, datasets=Path, **kinds)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _block(text: str) -> str:
    if not all(text.partition("/")):
        raise ArgumentTypeError(f"{text!r} names no block: write TYPE/NAME, such as slack-webhook/alerts")
    return text
