"""Studies of questions that the papers leave open, each made again by one command."""
