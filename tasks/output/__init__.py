"""The things that are at an output, and the locks and leases on them."""
