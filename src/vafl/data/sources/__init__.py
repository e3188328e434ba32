"""The sources of a party's records: tables, series, images, arrays and the party's own Python code."""
