"""Serve builds of a dataset from this machine, on a schedule if one is given: ``serve.py CONFIG.yaml [--cron "0 3 * * *"]``."""

import argparse
import sys
from pathlib import Path

from prefect.schedules import Cron

sys.path.insert(0, str(Path(__file__).parents[1]))

from flows.build import build_dataset
from flows.cli import read_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--cron", help="when to build; without it, only when asked to in the UI or by 'prefect deployment run'")
    parser.add_argument("--timezone", default="UTC")
    options = parser.parse_args()

    config = read_config(options.config, [])
    build_dataset.serve(
        name=config.name,
        parameters={"config": config.model_dump(mode="json", exclude_unset=True)},
        description=f"Builds {config.output}; does nothing where nothing changed.",
        schedule=Cron(options.cron, timezone=options.timezone) if options.cron else None,
        limit=1,
    )


if __name__ == "__main__":  # runs are started as processes, which import this file again
    main()
