"""Programs that run the service: the server of one machine, workers, and what is registered with a server."""
