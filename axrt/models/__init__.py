"""Built-in models: each a list of layers."""
