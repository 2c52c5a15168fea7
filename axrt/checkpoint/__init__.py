"""Checkpoints that know layers and parameters by name, and nothing of ranks: any number of them may
load what any other has saved."""
