"""The brain: which task may run next on a rank, and what follows from what ran.

Standard library only: no torch, no MPI, no clock, no thread.
"""
