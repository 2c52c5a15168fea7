"""A model of the cluster: devices and links as numbers, and closed forms of what they come to."""
