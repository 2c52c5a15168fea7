"""The parameters of a rank with their gradients and optimizer state, in buckets of flat memory."""
