"""Load public data sets."""
