"""`axrt train`: a run, with its files, its saves and its end."""
