"""Layouts of a run on a cluster: what layers would take there, and which layout is the fastest."""
