"""`datasets.map`: load Parquet, map a fast tokenizer of transformers over batches with a process a core, as the examples of
transformers do for language models, but without attention masks. What it leaves is the Arrow files of its cache.

    with_datasets.py TEXT_DIRECTORY VOCABULARY_DIRECTORY OUTPUT WORKERS
"""

import sys

import datasets
from transformers import AutoTokenizer

if __name__ == "__main__":
    text, vocabulary, output, workers = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(vocabulary)
    rows = datasets.load_dataset("parquet", data_files=f"{text}/*.parquet", split="train", cache_dir=f"{output}/loaded")
    rows.map(
        lambda batch: tokenizer(batch["text"], return_attention_mask=False),
        batched=True,
        num_proc=int(workers),
        remove_columns=rows.column_names,
        cache_file_name=f"{output}/tokens.arrow",
    )
