"""Flat arrays as stored objects: layouts, writing, opening, reading."""
