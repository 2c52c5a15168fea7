"""Text as tokens, and tokens as microbatches."""
