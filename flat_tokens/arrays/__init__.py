"""Flat arrays as stored objects: layouts, opening, reading."""
