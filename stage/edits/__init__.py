"""What a stage changed, and how that is shown."""
