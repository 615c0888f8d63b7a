"""datatrove: its MinHash in three stages, as its documentation has it: 5-grams of words, 14 buckets of 8 hashes, a task a file,
the executor of one machine. Its tokenizer of English words is not in its package: words are those between spaces, after its own
normalisation, which is faster. Its hash, xxHash of 64 bits, gets bytes, as the package wants them today. The fourth stage, which
writes the documents that stay, is left out.

    near_duplicates_with_datatrove.py TEXT_DIRECTORY OUTPUT WORKERS
"""

import sys
from pathlib import Path

import datatrove.pipeline.dedup.minhash as minhash
import xxhash
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader


class Words:
    """A tokenizer of words between spaces."""

    def word_tokenize(self, text):
        return text.split()


minhash.load_word_tokenizer = lambda language: Words()
minhash.create_hash_func = lambda config: lambda text: xxhash.xxh64_intdigest(text.encode())

if __name__ == "__main__":
    text, output, workers = sys.argv[1:]
    files, config = len(list(Path(text).glob("*.parquet"))), minhash.MinhashConfig()
    read = ParquetReader(text, text_key="text", id_key="id", glob_pattern="*.parquet")
    stages = {
        "signatures": ([read, minhash.MinhashDedupSignature(f"{output}/signatures", config)], files),
        "buckets": (
            [minhash.MinhashDedupBuckets(f"{output}/signatures", f"{output}/buckets", config=config)],
            config.num_buckets,
        ),
        "clusters": ([minhash.MinhashDedupCluster(f"{output}/buckets", f"{output}/clusters", config, save_cluster_id=True)], 1),
    }
    for name, (steps, tasks) in stages.items():
        at_once = min(int(workers), tasks)
        LocalPipelineExecutor(pipeline=steps, tasks=tasks, workers=at_once, logging_dir=f"{output}/logs/{name}").run()
