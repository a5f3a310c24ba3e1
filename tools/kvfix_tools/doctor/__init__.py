"""`kvfix doctor`: find problems of a set-up before the launch. The checks (`checks/`) read a `Setup`."""
