"""What a trainer asks for: rows of a split, packed or by document, shuffled, mixed."""
