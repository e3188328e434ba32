"""NVFlare's private set intersection, in an environment of its own."""
