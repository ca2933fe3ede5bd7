"""What the program costs, beside others' code and on one GPU."""
