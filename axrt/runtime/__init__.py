"""The loop of a rank, and what is run on it."""
