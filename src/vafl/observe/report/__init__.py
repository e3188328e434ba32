"""The report of one run, as a page."""
