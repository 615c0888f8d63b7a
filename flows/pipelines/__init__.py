"""What is done in which order, whoever runs it."""
