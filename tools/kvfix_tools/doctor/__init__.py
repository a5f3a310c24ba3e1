"""`kvfix doctor`: what cannot work in a set-up, before it is launched. Nothing is started, and nothing is changed.

Data flows one way: what is installed, the command line, the settings and the machine are read into a `Setup`; each
check (`checks/`) looks at it and answers with lines; the command prints them.
"""
