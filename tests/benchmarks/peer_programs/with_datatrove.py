"""datatrove: its own reader of Parquet and its own tokenizing step, a task a file, the executor of one machine. Not shuffled, for
the order of the documents is compared; the end-of-text token behind every document, as its step writes it.

    with_datatrove.py TEXT_DIRECTORY VOCABULARY_DIRECTORY OUTPUT WORKERS
"""

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    text, vocabulary, output, workers = sys.argv[1:]
    files = len(list(Path(text).glob("*.parquet")))
    steps = [
        ParquetReader(text, text_key="text", id_key="id", glob_pattern="*.parquet"),
        DocumentTokenizer(
            f"{output}/tokens",
            tokenizer_name_or_path=f"{vocabulary}/tokenizer.json",
            eos_token="<|endoftext|>",
            shuffle_documents=False,
            save_final_metadata=False,
        ),
    ]
    executor = LocalPipelineExecutor(pipeline=steps, tasks=files, workers=int(workers), logging_dir=f"{output}/logs")
    executor.run()
