"""Observers of the loop, and what a run shows and records."""
