"""Pages in a real browser. Without a browser, these tests are skipped."""
