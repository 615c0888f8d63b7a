"""Opens and reads each file of a directory, one after the other, and does nothing with it: what so many files cost anyway."""

import sys
from pathlib import Path

import pyarrow.parquet as pq

if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).iterdir()):
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                file.read()
        else:
            path.read_bytes()
