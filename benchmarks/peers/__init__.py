"""The peers that vafl is measured beside: what they need, how they are run, nothing of vafl itself."""
