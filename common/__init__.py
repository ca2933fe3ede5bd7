"""What the core and the environments share: settings of a command line, and files of runs."""
