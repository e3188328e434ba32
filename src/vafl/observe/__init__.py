"""What people and machines see of a run: its folder, progress, tables, plots, pages."""
