"""`deepspeed.runtime.pipe`."""
