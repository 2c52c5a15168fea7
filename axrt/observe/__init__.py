"""Observers of the loop, and the display and files of a run."""
