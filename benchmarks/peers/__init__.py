"""The systems that vafl is compared with. This package imports nothing of vafl."""
