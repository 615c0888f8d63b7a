"""What lies at an output, and who may change it."""
