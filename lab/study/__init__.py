"""Studies and comparisons of several runs. A study runs each method with several seeds. A report
shows the differences between the methods."""
