"""Record what every person has spent."""
