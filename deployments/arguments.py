"""Arguments of serve.py and register.py, and the work pools. Prefect is not imported: serve.py chooses its settings first."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from pathlib import Path

POOLS = {"builds": "flat-tokens", "groups": "flat-tokens-groups"}
"""Worker -> its pool."""


def arguments(description: str) -> ArgumentParser:
    """The arguments of serve.py and register.py: the deployments to register."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", type=Path, metavar="DATASET.yaml", help="refreshed by a deployment of its own")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--cron", help="when; without it, only when asked to in the UI or by 'prefect deployment run'")
    when.add_argument("--every", type=_positive, metavar="SECONDS", help="how often, instead of --cron")
    parser.add_argument("--timezone", default="UTC", help="of --cron, such as Europe/Paris (UTC)")
    about = "take other datasets off: their deployments go, their outputs and runs stay"
    parser.add_argument("--only", action="store_true", help=about)
    parser.add_argument("--keep", type=_positive, metavar="N", help="versions of each dataset that are kept (all)")
    about = "a block with credentials of stores (flows/credentials.py)"
    parser.add_argument("--credentials", type=_block, metavar="secret/NAME", help=about)
    about = "a notification block that hears of failures, such as slack-webhook/alerts"
    parser.add_argument("--notify", type=_block, metavar="TYPE/NAME", help=about)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _block(text: str) -> str:
    if not all(text.partition("/")):
        raise ArgumentTypeError(f"{text!r} names no block: write TYPE/NAME, such as slack-webhook/alerts")
    return text
