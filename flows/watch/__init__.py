"""Progress and summaries of runs, for people."""
