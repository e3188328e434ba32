"""Runs watched from a browser, or by a monitoring system: HTTP on top of what lies in their folders.

It reads files and takes no part in a run, which goes on whether somebody watches or not.
"""
