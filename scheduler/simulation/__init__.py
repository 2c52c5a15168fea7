"""The simulator: the brain of every rank on one clock, its costs, and what it shows."""
