"""The optimizer step of a stage, optimizers and learning-rate schedules by name."""
