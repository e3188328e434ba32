"""Show a run to people and programs: the run folder, progress, tables, plots, reports and the dashboard."""
