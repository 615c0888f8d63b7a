"""Pipelines: the stages in their order, without Prefect."""
