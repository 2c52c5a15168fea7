"""CPU memory as scratch space for optimizer state and parameters.

The room is reserved: what moves bytes between device, pinned and host memory goes here; when to
move is a decision and lives in `scheduler`. Nothing is offloaded yet.
"""
