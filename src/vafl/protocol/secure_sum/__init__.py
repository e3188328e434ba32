"""The secure sum: clients upload masked scores, and the masks cancel in the sum."""
