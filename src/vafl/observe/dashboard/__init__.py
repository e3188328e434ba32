"""`vafl watch`: show runs in a browser, and export them to a monitoring system.

The dashboard only reads the files in run folders. It does not connect to the runs and cannot affect them.
"""
