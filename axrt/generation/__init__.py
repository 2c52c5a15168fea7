"""Text that a trained model writes, on one rank or on many."""
