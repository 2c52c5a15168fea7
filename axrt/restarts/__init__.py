"""A job that is started again without a person: what `axrt launch` decides, and what it keeps."""
