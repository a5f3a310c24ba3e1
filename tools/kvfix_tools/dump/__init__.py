"""`kvfix dump PID` saves the stacks and recorders of a running or hung engine in one file for a bug report."""
