"""traffic."""
