"""Commands that are more than a few lines: each module has `add_options` and what the command does."""
