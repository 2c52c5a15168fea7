"""A run as one page of HTML that needs no network."""
