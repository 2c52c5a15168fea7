"""CPU memory or disk as scratch space for optimizer state, parameters and activations.

Here is where bytes lie, and how they get from one tier to another. When they move is a decision and
lives in `scheduler`.
"""
