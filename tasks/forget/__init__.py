"""Forgetting documents: where they are at an output, versions without them, what else held them, and the certificate."""
