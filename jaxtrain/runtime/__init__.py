"""How a process starts, what it runs on, and how it speaks to the terminal."""
