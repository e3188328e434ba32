"""Reading data sets and splitting them by columns over the parties."""
