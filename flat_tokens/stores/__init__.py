"""Stores of bytes: local directories and object stores."""
