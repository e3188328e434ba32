"""NVFlare's private set intersection, in a separate environment."""
