"""Stands in for torchvision, which Streaming imports for images."""
