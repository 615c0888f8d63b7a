"""The things that lie at an output, and the locks and leases on them."""
