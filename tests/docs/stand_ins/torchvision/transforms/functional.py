"""The name that Streaming imports."""

to_tensor = None
