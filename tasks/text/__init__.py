"""Slices and documents of a build."""
