"""Real federations under faults and attacks. `make chaos` runs all scenarios and writes their results."""
