"""A module as the graph of its operations, and that graph as layers of a pipeline."""
