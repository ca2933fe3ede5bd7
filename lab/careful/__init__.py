"""The careful run: what a week of runs needs beside the plain one."""
