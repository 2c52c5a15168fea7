"""The device of a rank: which one, its queues, its clock, and its host's memory and cores."""
