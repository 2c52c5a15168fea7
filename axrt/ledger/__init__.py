"""What a rank will hold, by purpose and tier of memory, before anything is allocated."""
