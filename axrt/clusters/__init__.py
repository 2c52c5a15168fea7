"""Batch scripts for clusters."""
