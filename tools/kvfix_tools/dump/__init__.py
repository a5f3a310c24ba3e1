"""`kvfix dump PID`: what a running or hung engine does, in one file to attach to a bug report."""
