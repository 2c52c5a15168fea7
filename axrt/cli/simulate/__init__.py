"""`axrt simulate`: a schedule on made-up or measured costs."""
