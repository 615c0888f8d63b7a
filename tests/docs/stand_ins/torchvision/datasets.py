"""The name that Streaming imports."""


class VisionDataset:
    """A dataset of images."""
