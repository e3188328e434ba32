"""Commands that are more than a few lines: each module has `add_parser` and what the command does."""
