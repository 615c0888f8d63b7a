"""Runners: threads, Prefect tasks, a work pool, a Ray cluster."""
