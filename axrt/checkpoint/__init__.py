"""Checkpoints that know layers and parameters by name, and nothing of ranks: any number of ranks
may load a checkpoint that any other number has saved."""
