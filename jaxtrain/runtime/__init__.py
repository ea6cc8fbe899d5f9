"""The start of a process, the machine that it runs on, and its output to the terminal."""
