"""The version of kvfix, which recorder files contain too."""

VERSION = "0.1.0"
