"""The record of what a run was trained on, or of a version: counts, and the documents that others ask for."""
