"""Work out what noise guarantees, and what a guarantee costs."""
