"""Pages in a real browser. Where there is none, these are skipped."""
