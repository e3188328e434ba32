"""Real federations, mistreated: `make chaos` runs them all, and writes what was done and what came of it."""
