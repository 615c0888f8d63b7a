"""Who runs the stages: threads, Prefect tasks, a work pool, a Ray cluster."""
