"""`kvfix doctor`: find problems of a set-up before the launch. It starts nothing and changes nothing.

Data flows one way. A `Setup` reads the installation, the command line, the settings and the machine. Each check
(`checks/`) reads the `Setup` and yields lines. The command prints the lines.
"""
