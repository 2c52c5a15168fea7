"""What a rank keeps of the model: weights, gradients and optimizer state, in buckets of flat
memory."""
