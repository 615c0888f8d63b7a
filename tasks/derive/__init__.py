"""Datasets made of datasets and of neighbours' files."""
