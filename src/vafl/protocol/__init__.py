"""The algorithm of VAFL as a pure state machine: no I/O, no clock, no threads, no global random state."""
